"""Operands that several patterns put together: adjacent parts as one tensor, rotary tables, caches and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .canonical.axes import Axis, Index, combine, leaves, of_axis, settle
from .canonical.cache_update import CacheUpdate
from .canonical.element import Element
from .canonical.rope import Rope, Table
from .canonical.views import shape_of
from .errors import NoMatch
from .match import Match
from .rewrite import Dims, Emitter, view_key

aten = torch.ops.aten
Axes = tuple[Axis, ...]


def axes_of(index: Index) -> Axes:
    """The axes that a dimension runs over, slowest first."""
    return leaves(index.axes)


def last_dimension(operand: str) -> Callable[[Match], Index]:
    """For `rope(along=...)`: the last dimension of an operand of the call, or of the row that is stored in it."""

    def along(match: Match) -> Index:
        update = match.readings.get(f"{operand}.write")
        index = match.readings[f"{operand}.axes"] if update is None else update.index
        return settle(index[-1])

    return along


def only(axes: Sequence[Axis], what: str, node: Node) -> Axis:
    if len(axes) != 1:
        raise NoMatch(f"{what} is no single dimension", node)
    return axes[0]


@dataclass(frozen=True)
class Joined:
    """Two neighbouring parts of one tensor as one element, read along `axis` where the first was read along its own."""

    element: Element
    axis: Axis


def joined(
    first: Element, first_axis: Axis, second: Element, second_axis: Axis, renamed: dict[Axis, Axis]
) -> Joined | None:
    """`first` along its axis and then `second` along its own, if they are neighbours in one tensor, else None.

    `renamed` names the other axes of `second` as in `first`."""
    first, second = first.settled(), second.settled()
    if first.node is not second.node or (first.scale, second.scale) != (1.0, 1.0) or first_axis not in first.axes:
        return None
    axis = Axis(first_axis.size + second_axis.size)
    index: list[Index] = []
    for mine, theirs in zip(first.index, second.index, strict=True):
        theirs = combine(theirs.offset, [(renamed.get(other, other), stride) for other, stride in theirs.terms])
        stride = dict(mine.terms).get(first_axis)
        rest = [term for term in mine.terms if term[0] is not first_axis]
        expected = mine.offset + (0 if stride is None else stride * first_axis.size)
        tail = [] if stride is None else [(second_axis, stride)]
        if theirs != combine(expected, [*rest, *tail]):
            return None
        index.append(mine if stride is None else combine(mine.offset, [*rest, (axis, stride)]))
    return Joined(Element(first.node, tuple(index)), axis)


def rename(old: Sequence[Axes], new: Sequence[Axes]) -> dict[Axis, Axis]:
    """Old axes -> new axes, place by place."""
    return {
        other: axis for theirs, mine in zip(old, new, strict=True) for other, axis in zip(theirs, mine, strict=False)
    }


# --- rotary tables -----------------------------------------------------------------------------------------------


def emit_table(emit: Emitter, table: Table, pair: Axis, outer: Dims) -> Node:
    """cos or sin with all its columns, [*outer, Dr]: those of the pairs' first elements, then of their second ones."""
    first, second = table.first.settled(), table.second.settled()
    other = Axis(pair.size)
    whole = joined(first, pair, second.at({pair: of_axis(other)}), other, {})
    if whole is not None:
        return emit.tensor(whole.element, [*outer, [whole.axis]], dtype=first.dtype)
    halves = [_all_pairs(emit, emit.tensor(half, [*outer, [pair]]), pair) for half in (first, second)]
    return emit.call(aten.cat.default, halves, -1)


def _all_pairs(emit: Emitter, half: Node, pair: Axis) -> Node:
    """A table with one column for all pairs, repeated for each."""
    if shape_of(half)[-1] == pair.size:
        return half
    return emit.call(aten.expand.default, half, [-1] * (len(shape_of(half)) - 1) + [pair.size])


def check_same_rotation(query: Rope | None, keys: Rope | None, query_outer: Dims, key_outer: Dims) -> None:
    """Query and key are rotated by the same tables in the same layout, or neither is."""
    if query is None and keys is None:
        return
    if query is None or keys is None:
        raise NoMatch("only one of query and key is rotated")
    if query.layout != keys.layout:
        raise NoMatch(f"the query is rotated in layout {query.layout}, the key in {keys.layout}", keys.value.node)
    for name, ours, theirs in (("cos", query.cos, keys.cos), ("sin", query.sin, keys.sin)):
        mine = [view_key(half, [*query_outer, [query.pair]]) for half in (ours.first, ours.second)]
        other = [view_key(half, [*key_outer, [keys.pair]]) for half in (theirs.first, theirs.second)]
        if mine != other:
            raise NoMatch(f"{name} of the query and {name} of the key are different tensors", theirs.first.node)


# --- caches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheRoles:
    """The axes of one written cache: batch, slot and width of the cache, batch and token of the rows."""

    update: CacheUpdate
    batch: Axes
    slot: Axes
    width: Axes
    token: Axes

    @property
    def row(self) -> tuple[Axes, Axes]:
        return self.batch, self.token


def cache_roles(update: CacheUpdate) -> CacheRoles:
    """The axes of an update whose last dimension is the width of a row."""
    last = len(update.index) - 1
    if update.dim == last:
        raise NoMatch("the cache is written along the last dimension, expected whole rows", update.node)
    batch = leaves(axis for dim, part in enumerate(update.index) if dim not in (update.dim, last) for axis in part.axes)
    return CacheRoles(
        update, batch, axes_of(update.index[update.dim]), axes_of(update.index[last]), axes_of(update.token)
    )


def check_same_write(latent: CacheRoles, keys: CacheRoles) -> None:
    """Latents and rotary keys go to the same positions of two caches."""
    if latent.update.node is keys.update.node:
        raise NoMatch("latent and rotary key share one cache tensor", keys.update.node)
    mine, other = latent.update.position, keys.update.position
    if isinstance(mine, Element) and isinstance(other, Element):
        same = view_key(mine, latent.row) == view_key(other, keys.row)
    else:
        same = mine == other
    if not same:
        raise NoMatch("latent and rotary key are written to different positions", keys.update.node)


def emit_cache(emit: Emitter, roles: CacheRoles) -> Node:
    """The cache before the write, [B,1,T,width]."""
    old = Element(roles.update.old, tuple(map(settle, roles.update.index)))
    return emit.tensor(old, (roles.batch, (), roles.slot, roles.width))


def emit_positions(emit: Emitter, roles: CacheRoles) -> Node:
    """Where the rows go, [B or 1, S] int64."""
    position = roles.update.position
    if isinstance(position, Element):
        return emit.tensor(position, roles.row, dtype=torch.int64)
    rows = roles.update.rows.meta["val"]
    length = emit.size(roles.token[0].size) if roles.token else 1
    options = {"start": position, "step": 1, "dtype": torch.int64, "device": rows.device, "requires_grad": False}
    return emit.call(aten.unsqueeze.default, emit.call(torch.ops.prims.iota.default, length, **options), 0)


def replace_cache(emit: Emitter, roles: CacheRoles, out: Node) -> None:
    """Uses the [B,1,T,width] cache that an operator returned wherever the written one was used."""
    element = emit.result(out, (roles.batch, (), roles.slot, roles.width))
    emit.replace(roles.update.node, roles.update.index, element)


def replace_rows(emit: Emitter, roles: CacheRoles, out: Node) -> None:
    """Uses the [B,S,1,width] rows that an operator returned wherever the new rows were used."""
    update = roles.update
    index = (*update.index[: update.dim], update.token, *update.index[update.dim + 1 :])
    emit.replace(update.rows, index, emit.result(out, (roles.batch, roles.token, (), roles.width)))
