"""Cache updates in place, where nobody reads the old cache afterwards."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .canonical.element import Element, resolve
from .canonical.views import MOVERS, args_of, fresh_index
from .ops import Operator, catalogue

aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """One cache of a fused operator: the view it is given, the graph input behind it, the result and its copy back."""

    given: Node
    source: Node
    result: Node
    copy_back: Node


def reinplace(graph: Graph) -> int:
    """Turns fused operators that update caches into their in-place twins; returns how many.

    An update qualifies if each cache it is given is a view of a graph input, the updated cache is copied back into
    just that view's place, and nothing behind the operator reads the old cache. The copy is then dropped."""
    twins = {entry.overload: entry for entry in catalogue().values() if entry.inplace is not None}
    order = {node: position for position, node in enumerate(graph.nodes)}
    fused = [node for node in graph.nodes if node.target in twins]
    return sum(_reinplace(node, twins[node.target], order) for node in fused)


def _reinplace(node: Node, twin: Operator, order: dict[Node, int]) -> bool:
    written = _written_results(twin)
    found = [_update(node, position, argument, order) for position, argument in written.items()]
    updates = [update for update in found if update is not None]
    if not updates or len(updates) != len(found) or len({update.source for update in updates}) != len(updates):
        return False
    assert twin.inplace is not None
    graph = node.graph
    with graph.inserting_before(node):
        call = graph.call_function(twin.inplace, args_of(node), node.kwargs)
        call.meta = dict(node.meta)
        kept = [position for position in range(len(twin.overload._schema.returns)) if position not in written]
        call.meta["val"] = tuple(node.meta["val"][position] for position in kept)
        for place, position in enumerate(kept):
            for result in _results(node, position):
                new = graph.call_function(operator.getitem, (call, place))
                new.meta = dict(result.meta)
                result.replace_all_uses_with(new)
    for update in updates:
        written_back = args_of(update.copy_back)[1]
        graph.erase_node(update.copy_back)
        update.result.replace_all_uses_with(update.given)
        _erase_unread(written_back)
    for user in list(node.users):
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _erase_unread(node: Node) -> None:
    """Erases a value, and the views and copies that led to it, as far as nobody reads them."""
    if node.users or node.target not in MOVERS:
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unread(source)


def _written_results(twin: Operator) -> dict[int, int]:
    """Which result is the updated form of which argument, by position."""
    arguments = [argument.name for argument in twin.overload._schema.arguments]
    names = [result.name.removesuffix("_out") for result in twin.overload._schema.returns]
    return {place: arguments.index(name) for place, name in enumerate(names) if name in arguments}


def _update(node: Node, position: int, argument: int, order: dict[Node, int]) -> Update | None:
    given = args_of(node)[argument]
    results = _results(node, position)
    source = _viewed_input(given) if isinstance(given, Node) else None
    if source is None or not isinstance(given, Node) or len(results) != 1:
        return None
    copies = [user for user in source.users if user.target is aten.copy_.default and args_of(user)[0] is source]
    if len(copies) != 1 or not _writes_back(copies[0], results[0], given, source):
        return None
    allowed = order[node]
    for reader in _readers(source):
        if reader is not node and reader is not copies[0] and order.get(reader, allowed + 1) > allowed:
            return None
    if any(reader.op == "output" for reader in _readers(results[0])):
        return None
    return Update(given, source, results[0], copies[0])


def _results(node: Node, position: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and args_of(user)[1] == position]


def _viewed_input(node: Node) -> Node | None:
    """The graph input of which `node` is a view, or None."""
    while node.op == "call_function" and node.target in MOVERS:
        source = args_of(node)[0]
        if not isinstance(source, Node) or not source.meta["val"].is_contiguous():
            return None  # a reshape of what is not contiguous may copy
        node = source
    return node if node.op == "placeholder" else None


def _writes_back(copy_back: Node, result: Node, given: Node, source: Node) -> bool:
    """What is copied back to an element of the input is what the in-place operator would have left there."""
    index = fresh_index(source)
    value = copy_back.args[1]
    if not isinstance(value, Node):
        return False
    written = resolve(value, index)
    if written.node is not result or written.scale != 1.0:
        return False
    return resolve(given, written.index) == Element(source, index)


def _readers(node: Node) -> list[Node]:
    """What reads a value, itself or through views."""
    readers: list[Node] = []
    for user in node.users:
        readers += _readers(user) if user.target in MOVERS and user.target is not operator.getitem else [user]
    return readers
