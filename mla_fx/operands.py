"""Operands that several patterns put together: adjacent parts as one tensor, rotary tables, caches and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .binding import Match
from .emitter import Emitter
from .errors import NoMatch
from .layout import Axes, Dims, axes, result, tensor
from .match import OperandAxes
from .readings.axes import Axis, Index, axes_of, combine, of_axis, shifted, whole
from .readings.cache_update import CacheUpdate
from .readings.counts import Count, count
from .readings.element import Element, resolve
from .readings.reading import renamed
from .readings.rms_norm import RmsNorm
from .readings.rope import Rope, Table
from .readings.sizes import product
from .replacement import Replacement, replaced

aten = torch.ops.aten


def roles(match: Match, operand: str) -> tuple[Axes, ...]:
    """The axes of each dimension of an operand of the call."""
    found = match.reading(OperandAxes, f"{operand}.axes")
    return tuple(axes(part, operand, found.node) for part in found.dims)


def last_dimension(operand: str) -> Callable[[Match], Axis]:
    """For `rope(along=...)`: the last dimension of an operand of the call, or of the row that is stored in it."""

    def along(match: Match) -> Axis:
        update, found = match.get(CacheUpdate, f"{operand}.write"), match.reading(OperandAxes, f"{operand}.axes")
        axis = (found.dims if update is None else update.index)[-1].axis
        if axis is None:
            raise NoMatch("a rotary dimension of one element", found.node)
        return axis

    return along


def only(found: Sequence[Axis], what: str, node: Node) -> Axis:
    if len(found) != 1:
        raise NoMatch(f"{what} is no single dimension", node)
    return found[0]


@dataclass(frozen=True)
class Joined:
    """Two neighbouring parts of one tensor as one element, read along `axis` where the first was read along its own."""

    element: Element
    axis: Axis


def joined(first: Element, first_axis: Axis, second: Element, second_axis: Axis) -> Joined | None:
    """`first` along its axis and then `second` along its own, if they are neighbours in one tensor, else None."""
    (node, left, factor), (other, right, other_factor) = _place(first), _place(second)
    if node is not other or (factor, other_factor) != (1.0, 1.0):
        return None
    axis = Axis(first_axis.size + second_axis.size)
    index: list[Index] = []
    for mine, theirs in zip(left, right, strict=True):
        stride = dict(mine.terms).get(whole(first_axis))
        rest = [term for term in mine.terms if term[0].axis is not first_axis]
        if stride is None:
            expected = mine
        else:
            expected = combine(mine.offset + stride * first_axis.size, [*rest, (whole(second_axis), stride)])
        if theirs != expected:
            return None
        index.append(mine if stride is None else combine(mine.offset, [*rest, (whole(axis), stride)]))
    is_read = sum(first_axis in part.axes for part in left) == sum(axis in part.axes for part in index) == 1
    return Joined(resolve(node, tuple(index)), axis) if is_read else None


def _place(part: Element) -> tuple[Node, tuple[Index, ...], float]:
    """Where a part lies: behind its roundings, if it has any, of which none may be lost."""
    return part.held if part.roundings else (part.origin, part.index, part.factor)


# --- norms and rotary tables -----------------------------------------------------------------------------------------


def check_norm_of_rows(norm: RmsNorm, width: Axes) -> None:
    """The norm is taken over the columns of one row, all of them."""
    over = [axis for part in norm.over for axis in axes(part, "the normalised dimension", norm.node)]
    if over != list(width):
        raise NoMatch("the norm is taken over something else than the columns of a row", norm.node)


def emit_table(emit: Emitter, table: Table, pair: Index, outer: Dims) -> Node:
    """cos or sin with all its columns, [*outer, Dr]: those of the pairs' first elements, then of their second ones."""
    pairs = axes(pair, "a rotary table", table.node)
    first, second = table.first, table.second
    if len(pairs) == 1:
        other = Axis(pairs[0].size)
        whole_table = joined(first, pairs[0], renamed(second, {pairs[0]: of_axis(other)}), other)
        if whole_table is not None:
            return tensor(emit, whole_table.element, [*outer, [whole_table.axis]], dtype=first.dtype)
    halves = [tensor(emit, half, [*outer, pairs], expand=True) for half in (first, second)]
    return emit.call(aten.cat.default, halves, -1)


def check_same_rotation(query: Rope | None, keys: Rope | None) -> None:
    """Query and key are rotated by the same tables in the same layout, or neither is."""
    if query is None and keys is None:
        return
    if query is None or keys is None:
        rotated = query or keys
        raise NoMatch("only one of query and key is rotated", rotated.node if rotated else None)
    if query.layout != keys.layout:
        raise NoMatch(f"the query is rotated in layout {query.layout}, the key in {keys.layout}", keys.node)
    pair = dict(zip(axes_of(keys.pair) or (), map(of_axis, axes_of(query.pair) or ()), strict=True))
    for name, mine, theirs in (("cos", query.cos, keys.cos), ("sin", query.sin, keys.sin)):
        if (mine.first, mine.second) != (renamed(theirs.first, pair), renamed(theirs.second, pair)):
            raise NoMatch(f"{name} of the query and {name} of the key are different tensors", theirs.first.origin)


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
    dims = [axes(part, "the cache", update.node) for part in update.index]
    batch = tuple(axis for dim, found in enumerate(dims) if dim not in (update.dim, last) for axis in found)
    return CacheRoles(update, batch, dims[update.dim], dims[last], axes(update.token, "the new rows", update.node))


def check_same_write(latent: CacheRoles, keys: CacheRoles) -> None:
    """Latents and rotary keys go to the same positions of two caches."""
    mine, theirs = latent.update, keys.update
    is_same = mine.wraps == theirs.wraps and _counted(mine) == _counted(theirs)
    if not is_same or latent.row != keys.row:
        raise NoMatch("latent and rotary key are written to different positions", theirs.node)


def _counted(update: CacheUpdate) -> Count | None:
    """Where a row goes, as far as it is counted, since each cache may count its positions anew; None if appended."""
    if isinstance(update.position, Element):
        return count(update.position)
    return None if update.position is None else Count(shifted(update.token, update.position))


def emit_cache(emit: Emitter, cache: CacheRoles) -> Node:
    """The cache before the write, [B,1,T,width]."""
    old = Element(cache.update.old, cache.update.index)
    return tensor(emit, old, (cache.batch, (), cache.slot, cache.width))


def emit_positions(emit: Emitter, cache: CacheRoles, *others: CacheRoles) -> Node:
    """Where the rows go, [B or 1, S] int64, counted from the start: in others that are written alike too."""
    position = cache.update.position
    assert position is not None, "rows that are appended have no positions"
    alike = (other.update.position for other in others)
    emit.sources.update(place.origin for place in alike if isinstance(place, Element))
    if isinstance(position, Element):
        given = tensor(emit, position, cache.row, dtype=torch.int64)
        return _counted_from_start(emit, given, cache) if cache.update.wraps else given
    rows = cache.update.rows.meta["val"]
    length, start = emit.size(product(axis.size for axis in cache.token)), emit.size(position)
    options = {"start": start, "step": 1, "dtype": torch.int64, "device": rows.device, "requires_grad": False}
    return emit.call(aten.unsqueeze.default, emit.call(torch.ops.prims.iota.default, length, **options), 0)


def _counted_from_start(emit: Emitter, given: Node, cache: CacheRoles) -> Node:
    """Positions below zero count from the end, in an indexed assignment."""
    slots = emit.size(product(axis.size for axis in cache.slot))
    is_negative = emit.call(aten.lt.Scalar, given, 0)
    return emit.call(aten.where.self, is_negative, emit.call(aten.add.Tensor, given, slots), given)


def replace_cache(emit: Emitter, cache: CacheRoles, out: Node) -> Replacement:
    """Uses the [B,1,T,width] cache that an operator returned wherever the written one was used."""
    element = result(out, (cache.batch, (), cache.slot, cache.width))
    return replaced(emit, cache.update.node, cache.update.index, element)


def replace_rows(emit: Emitter, cache: CacheRoles, out: Node) -> Replacement:
    """Uses the [B,S,1,width] rows that an operator returned wherever the new rows were used."""
    update = cache.update
    index = (*update.index[: update.dim], update.token, *update.index[update.dim + 1 :])
    return replaced(emit, update.rows, index, result(out, (cache.batch, cache.token, (), cache.width)))
