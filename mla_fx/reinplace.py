"""Cache updates in place, where nobody reads the old cache afterwards."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .aliasing import may_share, owner, readers, surely_shares, writers, written
from .errors import NoMatch
from .ops import Operator, catalogue
from .readings.element import Element, resolve
from .readings.sizes import size_of
from .readings.views import args_of, argument, fresh_index

aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """One cache of a fused operator: the view it is given, the graph input behind it, the result and its copy back."""

    given: Node
    source: Node
    results: tuple[Node, ...]
    copy_back: Node


def reinplace(graph: Graph) -> Counter[str]:
    """Turns fused operators that update caches into their in-place twins; returns why others stay, and how many.

    An update qualifies if each cache it is given is a view of a graph input, the updated cache is copied back into
    just that view's place, and nothing behind the operator reads the old cache. The copy is then dropped."""
    refusals: Counter[str] = Counter()
    if not graph.find_nodes(op="call_function", target=aten.copy_.default):
        return refusals
    twins = {entry.overload: entry for entry in catalogue().values() if entry.inplace is not None}
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target in twins]:
        twin = twins[node.target]
        try:
            updates = _updates(node, twin, order)
        except NoMatch as refusal:
            refusals[f"{twin.name} does not write its caches in place: {refusal.reason}"] += 1
        except Exception as error:  # nothing was changed yet, so a reading that fails costs this operator's copy only
            refusals[f"{twin.name} does not write its caches in place: {type(error).__name__}: {error}"] += 1
        else:
            order[_write_in_place(node, twin, updates)] = order[node]
    return refusals


# --- may it? ---------------------------------------------------------------------------------------------------------


def _updates(node: Node, twin: Operator, order: dict[Node, int]) -> list[Update]:
    """What is written, each into a graph input of its own: one view of it is given, and one result copied back."""
    return [_update(node, position, name, order) for position, name in _written_results(twin).items()]


def _written_results(twin: Operator) -> dict[int, str]:
    """Which result is the updated form of which argument."""
    arguments = {argument.name for argument in twin.overload._schema.arguments}
    names = [result.name.removesuffix("_out") for result in twin.overload._schema.returns]
    return {place: name for place, name in enumerate(names) if name in arguments}


def _update(node: Node, position: int, name: str, order: dict[Node, int]) -> Update:
    schema = node.target._schema  # type: ignore[union-attr]  # a fused operator's node, so an overload
    given = argument(node, [entry.name for entry in schema.arguments].index(name), name)
    source = _viewed_input(given) if isinstance(given, Node) else None
    if source is None:
        raise NoMatch(f"{name} is no view of a graph input")
    if any(owner(operand) is source for operand in node.all_input_nodes if operand is not given):
        raise NoMatch(f"another operand lies in the same graph input as {name}")
    results = tuple(_results(node, position))
    copies = list(writers(source))
    is_one_copy = len(copies) == 1 and copies[0].target is aten.copy_.default and not copies[0].users
    if not is_one_copy or args_of(copies[0])[0] is not source:
        raise NoMatch(f"the graph input of {name} is not written once and whole")
    if not _writes_back(copies[0], results, given, source):
        raise NoMatch(f"the updated {name} is not what the graph input becomes, element for element")
    for reader in readers(source):
        if reader is not node and order.get(reader, len(order)) > order[node]:
            raise NoMatch(f"{reader.op if reader.op == 'output' else reader.name} reads the {name} from before")
    if any(reader.op == "output" for result in results for reader in readers(result)):
        raise NoMatch(f"the updated {name} is an output")
    return Update(given, source, results, copies[0])


def _results(node: Node, position: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and args_of(user)[1] == position]


def _viewed_input(node: Node) -> Node | None:
    """The graph input of which `node` is a view, or None."""
    while node.op == "call_function":
        source = surely_shares(node)
        if source is None:
            return None
        node = source
    return node if node.op == "placeholder" else None


def _writes_back(copy_back: Node, results: tuple[Node, ...], given: Node, source: Node) -> bool:
    """What is copied back to an element of the input is what the in-place operator would have left there."""
    index = fresh_index(source)
    element = resolve(args_of(copy_back)[1], index)
    if element.origin not in results or element.factor != 1.0 or element.roundings:
        return False
    return resolve(given, element.index) == Element(source, index)


# --- do it -----------------------------------------------------------------------------------------------------------


def _write_in_place(node: Node, twin: Operator, updates: list[Update]) -> Node:
    assert twin.inplace is not None, "only operators with a twin are looked at"
    graph, updated = node.graph, _written_results(twin)
    kept = [position for position in range(len(twin.overload._schema.returns)) if position not in updated]
    with graph.inserting_before(node):
        call = graph.call_function(twin.inplace, args_of(node), node.kwargs)
        call.meta = {**node.meta, "val": tuple(node.meta["val"][position] for position in kept)}
        for place, position in enumerate(kept):
            for result in _results(node, position):
                new = graph.call_function(operator.getitem, (call, place))
                new.meta = dict(result.meta)
                result.replace_all_uses_with(new)
    for update in updates:
        _read_the_cache_itself(update)
    for unused in (*node.users, node):
        if not unused._erased:
            graph.erase_node(unused)
    return call


def _read_the_cache_itself(update: Update) -> None:
    """Drops the copy back, and has what read the operator's result read the cache that it wrote."""
    value = args_of(update.copy_back)[1]
    update.copy_back.graph.erase_node(update.copy_back)
    for result in update.results:
        if not _lie_alike(update.given, result):
            _view_in_any_layout(result)
        result.replace_all_uses_with(update.given)
    _erase_unread(value)


def _lie_alike(one: Node, other: Node) -> bool:
    left, right = one.meta["val"], other.meta["val"]
    strides = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(size_of(size) == 1 or size_of(mine) == size_of(theirs) for size, mine, theirs in strides)


def _view_in_any_layout(value: Node) -> None:
    """Views were traced for the result's own layout; a cache between gaps needs a reshape, which copies if it must."""
    for user in value.users:
        if value in may_share(user):
            _view_in_any_layout(user)
        if user.target is aten.view.default:
            user.target = aten.reshape.default


def _erase_unread(node: Node) -> None:
    """Erases a value, and what led to it, as far as nobody reads it."""
    if node.users or node.op != "call_function" or written(node):
        return
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if not operand._erased:
            _erase_unread(operand)
