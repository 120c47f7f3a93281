"""Turns cache updates into in-place updates where nothing reads the old cache afterwards."""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import placed_name
from mla_fx.graph.schemas import may_share, owner, readers, stride_readers, surely_shares, updated_arguments, writers
from mla_fx.graph.torch_private import OpOverload
from mla_fx.graph.walk import unread_without
from mla_fx.ops import Operator, catalogue
from mla_fx.readings.axes import Index, fresh, shifted, substitute
from mla_fx.readings.calls import args_of, named_argument
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.sizes import product, size_of
from mla_fx.readings.views import fresh_index, shape_of, written_slice
from mla_fx.rewriting.draft import Change, Draft, value_of
from mla_fx.rewriting.emitter import Apply, Emitter
from mla_fx.rewriting.materialize import fill_memory_alike

aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """One cache of a fused operator: the view it reads, the graph input behind it, the results and the copy back."""

    given: Node
    source: Node
    results: tuple[Node, ...]
    copy_back: Node

    @property
    def value(self) -> Node:
        return args_of(self.copy_back)[1]  # type: ignore[no-any-return]  # the operand of a copy is a node

    @property
    def instead(self) -> list[tuple[Node, Node]]:
        """Pairs of a value that is no longer read and the value that is read instead."""
        return [*((result, self.given) for result in self.results), (self.value, self.source)]


def reinplace(graph: Graph, apply: Apply) -> Counter[str]:
    """Turn fused operators that update caches into their in-place forms; return why others stay, with counts.

    An operator qualifies if each of its caches is a view of a graph input, the updated cache is copied back to exactly
    that view's elements, the rest of the input stays unchanged, and nothing after the operator reads the old cache. The
    copy is then dropped."""
    refusals: Counter[str] = Counter()
    if not graph.find_nodes(op="call_function", target=aten.copy_.default):
        return refusals
    emit = Emitter(graph)
    writing = {entry.overload: entry for entry in catalogue().values() if entry.inplace is not None}
    for node in [node for node in graph.nodes if node.target in writing]:
        form = writing[node.target]
        try:
            apply(emit, f"writing in place by {placed_name(node)}", _in_place(emit, node, form, _updates(node, form)))
        except NoMatch as refusal:
            refusals[f"{form.name} does not write its caches in place: {refusal.reason}"] += 1
    return refusals


# --- may it? ---------------------------------------------------------------------------------------------------------


def _updates(node: Node, form: Operator) -> list[Update]:
    """The cache updates of an operator, each into a graph input of its own. Raises NoMatch if one does not qualify."""
    results = updated_arguments(form.overload).items()
    return [_update(node, position, name) for position, name in results if _is_used(node, position, name)]


def _is_used(node: Node, position: int, name: str) -> bool:
    """Whether a cache counts as updated: False for one without elements whose result is unread."""
    given = named_argument(node, name)
    return not isinstance(given, Node) or 0 not in shape_of(given) or bool(_results(node, position))


def _update(node: Node, position: int, name: str) -> Update:
    given = named_argument(node, name)
    source = _viewed_input(given) if isinstance(given, Node) else None
    if source is None:
        made = _made_by(given) if isinstance(given, Node) else ""
        raise NoMatch(f"{name} is not a view of a graph input{made}")
    if any(owner(operand) is source for operand in node.all_input_nodes if operand is not given):
        raise NoMatch(f"another operand is in the same graph input as {name}")
    copies = list(writers(source))
    is_one_copy = len(copies) == 1 and copies[0].target is aten.copy_.default and not copies[0].users
    if not is_one_copy or args_of(copies[0])[0] is not source:
        raise NoMatch(f"the graph input of {name} is not written exactly once and completely")
    update = Update(given, source, tuple(_results(node, position)), copies[0])
    if not _written_back(_Part(update.value, *[fresh_index(source)] * 2), update):
        raise NoMatch(f"the updated {name} differs from what the graph input becomes")
    if any(reader.op == "output" for part in (*update.results, update.value) for reader in readers(part)):
        raise NoMatch(f"the updated {name} is an output")
    if any(any(stride_readers(result)) and not fill_memory_alike(result, cache) for result, cache in update.instead):
        raise NoMatch(f"the updated {name} is read by its strides, and the graph input has other strides")
    spared = {node, *unread_without({update.value})}
    for reader in readers(source):
        if reader not in spared and reader > node:
            raise NoMatch(f"{reader.op if reader.op == 'output' else reader.name} reads the old {name}")
    return update


def _results(node: Node, position: int) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem and args_of(user)[1] == position]


def _viewed_input(node: Node) -> Node | None:
    """The graph input that `node` is a view of, or None."""
    while node.op == "call_function":
        source = surely_shares(node)
        if source is None:
            return None
        node = source
    return node if node.op == "placeholder" else None


def _made_by(node: Node) -> str:
    """What computes a value that is no view of a graph input."""
    while (source := surely_shares(node)) is not None:
        node = source
    if node.target is aten.empty.memory_format:
        return ", but new memory, from which rows are written to the program's own cache"
    return f", but computed by {node.target._opname}" if isinstance(node.target, OpOverload) else ""


class _Part(NamedTuple):
    """A value at the indices `read`, which is copied to the graph input at the indices `place`."""

    value: Node
    read: tuple[Index, ...]
    place: tuple[Index, ...]


def _written_back(part: _Part, update: Update) -> bool | None:
    """Whether a part is what the in-place operator leaves in the graph input.

    True if it holds the whole result at the elements that the operator was given, and the old elements elsewhere. False
    if it holds only old elements. None if it holds anything else."""
    element, there = resolve(part.value, part.read), Element(update.source, part.place)
    if element == there:
        return False
    if element.factor != 1.0 or element.roundings:
        return None
    if element.origin in update.results:
        is_whole = product(axis.size for axis in element.axes) == product(shape_of(element.origin))
        return True if is_whole and resolve(update.given, element.index) == there else None
    parts = _scattered(element, part.place)
    # old elements may be next to the result, but must not overwrite it
    return None if parts is None or _written_back(parts[0], update) is None else _written_back(parts[1], update) or None


def _scattered(element: Element, place: tuple[Index, ...]) -> tuple[_Part, _Part] | None:
    """The base of a slice_scatter and the rows it writes; None if it is not a slice_scatter with step 1."""
    node = element.origin
    if node.target is not aten.slice_scatter.default:
        return None
    dim, bounds = written_slice(node)
    axis = element.index[dim].axis
    if bounds is None or bounds[2] != 1 or axis is None:
        return None
    base, rows = args_of(node)[:2]
    row = fresh(shape_of(rows)[dim])
    moved = [substitute(index, {axis: shifted(row, bounds[0])}) for index in place]
    if None in moved:
        return None
    index = (*element.index[:dim], row, *element.index[dim + 1 :])
    return _Part(base, element.index, place), _Part(rows, index, tuple(index for index in moved if index is not None))


# --- do it -----------------------------------------------------------------------------------------------------------


def _in_place(emit: Emitter, node: Node, form: Operator, updates: list[Update]) -> Change:
    """The in-place form instead of a call, and the caches themselves instead of its results and of what is copied."""
    updated, value = updated_arguments(form.overload), node.meta["val"]
    kept = [position for position in range(len(form.overload._schema.returns)) if position not in updated]
    call = Draft(form.inplace, node.args, node.kwargs, tuple(value[position] for position in kept), meta=node.meta)
    new_of: dict[Node, Draft | Node] = {node: call}
    for place, position in enumerate(kept):
        for old in _results(node, position):
            new_of[old] = Draft(operator.getitem, (call, place), {}, old.meta["val"], meta=old.meta)
    pairs = [pair for update in updates for pair in update.instead]
    for old, new in (*pairs, *(view for pair in pairs for view in _in_its_layout(emit, *pair))):
        new_of.setdefault(old, new)
    return Change.of(new_of.items(), set(), dropped=[update.copy_back for update in updates])


def _in_its_layout(emit: Emitter, old: Node, new: Draft | Node) -> Iterator[tuple[Node, Draft | Node]]:
    """Views of a value, and reshapes of what replaces it, if that lies otherwise: a view was traced for its layout, and
    a cache with gaps may need a copy."""
    given: dict[Any, Any] = {old: new}
    for user in () if _lie_alike(old, new) else old.users:
        if old in may_share(user):
            target = aten.reshape.default if user.target is aten.view.default else user.target
            args, options = map_aggregate((user.args, user.kwargs), lambda leaf: given.get(leaf, leaf))
            view = emit.call(target, *args, **options)
            behind = list(_in_its_layout(emit, user, view))
            yield from [(user, view), *behind] if behind or target is not user.target else []


def _lie_alike(one: Node, other: Draft | Node) -> bool:
    left, right = value_of(one), value_of(other)
    if not isinstance(left, torch.Tensor):
        return False
    strides = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(size_of(size) == 1 or size_of(mine) == size_of(theirs) for size, mine, theirs in strides)
