"""Builds operands that several patterns need: adjacent parts as one tensor, rotary tables, caches and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match
from mla_fx.matching.pattern import OperandAxes, Pattern, refused, rms_norm, var
from mla_fx.readings.axes import Axis, Index, combine, composite, extent, of_axis, shifted, substitute, whole
from mla_fx.readings.cache_places import Appended, At, CacheUpdate, From, InBlocks, WholeBlocks
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.integers import IntegerSum, integer_sum
from mla_fx.readings.paged import Paged
from mla_fx.readings.reading import renamed
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope, Table
from mla_fx.readings.sizes import Size, at_most, plain, product

from .bounds import count, counted_from_start, is_below, is_from_start, or_else, proved
from .fractals import check_memory, in_nz
from .materialize import Axes, Dims, axes, tensor
from .plan import ByTarget, Call, Expression, Part, Replaced, Representative, result
from .replacement import replaced

aten = torch.ops.aten


def roles(match: Match, operand: str) -> tuple[Axes, ...]:
    """The axes of each dimension of an operand of the call."""
    found = match.reading(OperandAxes, f"{operand}.axes")
    return tuple(axes(part, operand, found.node) for part in found.dims)


def last_dimension(operand: str) -> Callable[[Match], Axis]:
    """For `rope(along=...)`: the last dimension of an operand of the call, or of a row stored in it."""

    def along(match: Match) -> Axis:
        update, found = match.get(CacheUpdate, f"{operand}.write"), match.reading(OperandAxes, f"{operand}.axes")
        axis = (found.dims if update is None else update.index)[-1].axis
        if axis is None:
            raise NoMatch("a rotary dimension of one element", found.node)
        return axis

    return along


def normed(value: str, operator: str) -> Pattern:
    """A refused near miss: the value is normalised, but `operator` takes it without a norm."""
    norm = rms_norm(var(value), var(f"gamma of {value}"), name=f"norm of {value}")
    return refused(norm, because=f"{value} is normalised, which {operator} does not support")


def rotary(match: Match, operand: str, unrotated: Axes) -> Axes:
    """The columns of an operand that its rotation turns; `unrotated` if it is not rotated."""
    rotation = match.get(Rope, f"{operand}.rope")
    return axes(rotation.along, "the rotary dimension", rotation.node) if rotation else unrotated


@dataclass(frozen=True)
class Joined:
    """Two adjacent parts of one tensor as one element, read along `axis`, which counts the columns of both."""

    element: Element
    axis: Axis


def joined(first: Element, columns: Axes, second: Element, others: Axes) -> Joined | None:
    """`first` along its columns and then `second` along its own, if they are adjacent in one tensor; else None."""
    (node, left, factor), (other, right, other_factor) = _source(first), _source(second)
    if node is not other or (factor, other_factor) != (1.0, 1.0) or len(columns) > 1 or len(others) > 1:
        return None
    start, stop = (product(axis.size for axis in part) for part in (columns, others))
    axis = Axis(start + stop)
    here, behind = {axis: composite(columns)}, {axis: shifted(composite(others), start)}
    index: list[Index] = []
    for mine, theirs in zip(left, right, strict=True):
        rest = [term for term in mine.terms if term[0].axis not in columns]
        both = combine(mine.offset, [*rest, (whole(axis), _stride(mine, columns, theirs, others))])
        if (substitute(both, here), substitute(both, behind)) != (mine, theirs):
            return None
        index.append(both)
    return Joined(resolve(node, tuple(index)), axis) if sum(axis in part.axes for part in index) == 1 else None


def _stride(mine: Index, columns: Axes, theirs: Index, others: Axes) -> Size:
    """The distance of neighbouring columns in a dimension. If each part has one column, the distance of these two."""
    for part, found in ((mine, columns), (theirs, others)):
        if found:
            return dict(part.terms).get(whole(found[0]), 0)
    distance = plain(theirs.offset - mine.offset)
    return distance if at_most(1, distance) else 0


def joined_weights(match: Match, first: tuple[str, Axes], second: tuple[str, Axes], what: str) -> tuple[Element, Axes]:
    """Two weights, given by name, as one, without scales, and the columns of both. Raises NoMatch if they are not
    adjacent."""
    for name, columns in (first, second):
        if len(columns) > 1:
            raise NoMatch(f"the columns of {name} are not one dimension", match[name].origin)
    return joined_parts(match[first[0]], first[1], match[second[0]], second[1], f"the weights of {what}")


def joined_parts(one: Element, columns: Axes, other: Element, others: Axes, what: str) -> tuple[Element, Axes]:
    """Two parts as one, and the columns of both. Raises NoMatch if they are not adjacent."""
    whole = joined(one, columns, other, others)
    if whole is None:
        raise NoMatch(f"{what} are {_apart(one, other)}", other.origin)
    return whole.element, (whole.axis,)


def _apart(one: Element, other: Element) -> str:
    if one.origin is other.origin:
        return "not adjacent in one matrix"
    return "two parameters; the operator takes one matrix, which would be a copy of both"


def _source(part: Element) -> tuple[Node, tuple[Index, ...], float]:
    """The node, index and factor of a part: its rounded value if it is rounded, because no rounding may be lost."""
    return part.as_operand if part.roundings else (part.origin, part.index, part.factor)


# --- norms and rotary tables -----------------------------------------------------------------------------------------


def check_norm_of_rows(norm: RmsNorm, width: Axes) -> None:
    """Raises NoMatch unless the norm is taken over all columns of one row."""
    over = [axis for part in norm.over for axis in axes(part, "the normalised dimension", norm.node)]
    if over != list(width):
        raise NoMatch("the norm is not over the columns of a row", norm.node)


def table(found: Table, pair: Index, outer: Dims, *, expand: bool = False) -> Expression:
    """cos or sin with all columns, [*outer, Dr]: those of the pairs' first elements, then those of the second ones.

    A dimension in which the table is the same has one element, or all of them with `expand`."""
    pairs = axes(pair, "a rotary table", found.node)
    first, second = found.first, found.second
    if len(pairs) == 1:
        other = Axis(pairs[0].size)
        whole_table = joined(first, pairs, renamed(second, {pairs[0]: of_axis(other)}), (other,))
        if whole_table is not None:
            return tensor(whole_table.element, [*outer, [whole_table.axis]], dtype=first.stored.dtype, expand=expand)
    return Call(aten.cat.default, [tensor(half, [*outer, pairs], expand=True) for half in (first, second)], -1)


def tables(
    rotation: Rope | None, names: Sequence[str], outer: Dims, *, equal: Rope | None = None, expand: bool = False
) -> list[Expression | None]:
    """The tables with the given names, each None if there is no rotation.

    They also replace those of `equal`, a rotation by equal tables."""
    if rotation is None:
        return [None for _ in names]
    found: list[Expression] = [table(getattr(rotation, name), rotation.pair, outer, expand=expand) for name in names]
    others: list[Table] = [] if equal is None else [getattr(equal, name) for name in names]
    alike = [(part.first.origin, part.second.origin) for part in others]
    return [*map(Representative, found, alike)] if alike else [*found]


# --- caches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CacheRoles:
    """The axes of one written cache: batch, slot and width of the cache, and the token of the rows."""

    update: CacheUpdate
    batch: Axes
    slot: Axes
    width: Axes
    token: Axes

    @property
    def row(self) -> tuple[Axes, Axes]:
        return self.batch, self.token

    @property
    def mode(self) -> str:
        """The cache_mode in which operators write it in place."""
        return "Norm" if self.update.fractals is None else "NZ"


def cache_roles(update: CacheUpdate, *, may_be_nz: bool = False) -> CacheRoles:
    """The axes of an update whose last dimension is the width of a row. Raises NoMatch for pages in FRACTAL_NZ unless
    `may_be_nz`."""
    if update.fractals is not None:
        if not may_be_nz:
            raise NoMatch("the cache holds the columns of a row in two dimensions, expected rows", update.node)
        check_memory(*in_nz(update.old, update.fractals))
    last = len(update.index) - 1
    if update.behind > last:
        raise NoMatch("the cache is written along the last dimension, expected whole rows", update.node)
    dims = [axes(part, "the cache", update.node) for part in update.index]
    slots = range(update.dim, update.behind)
    batch = tuple(axis for dim, found in enumerate(dims[:last]) if dim not in slots for axis in found)
    slot = tuple(axis for dim in slots for axis in dims[dim])
    return CacheRoles(update, batch, slot, dims[last], axes(update.token, "the new rows", update.node))


def check_same_write(latent: CacheRoles, keys: CacheRoles, what: str = "latent and rotary key") -> None:
    """Raises NoMatch unless latents and rotary keys are written to the same positions of two caches."""
    mine, theirs = latent.update, keys.update
    if latent.mode != keys.mode:
        raise NoMatch(f"only one of {what} is cached in FRACTAL_NZ", theirs.node)
    if _wraps(mine) != _wraps(theirs):
        raise NoMatch(f"negative positions are written for only one of {what}", theirs.node)
    if latent.row != keys.row or not _are_equal(_counted(mine), _counted(theirs)):
        raise NoMatch(f"{what} are written to different positions", theirs.node)


def _wraps(update: CacheUpdate) -> bool:
    """Whether a negative position counts from the end."""
    where = update.where
    return isinstance(where, InBlocks) or (isinstance(where, (At, WholeBlocks)) and where.wraps)


def _counted(update: CacheUpdate) -> tuple[IntegerSum, ...]:
    """The position of a row in comparable form, since each cache may compute its positions anew; empty if appended."""
    match update.where:
        case From(start):
            return (IntegerSum(shifted(update.token, start)),)
        case At(slot):
            return (integer_sum(slot),)
        case InBlocks(block, offset):
            return integer_sum(block), integer_sum(offset)
        case WholeBlocks(block, offset):
            return integer_sum(block), IntegerSum(offset)
        case Appended():
            return ()


def _are_equal(mine: tuple[IntegerSum, ...], theirs: tuple[IntegerSum, ...]) -> bool:
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and all(one.plus(other, -1).is_zero for one, other in pairs)


def old_cache(cache: CacheRoles) -> Expression:
    """The cache before the write, [B,1,T,width], or [Blocks,Columns/n0,BlockSize,n0] in FRACTAL_NZ."""
    old, fractals = cache.update.old, cache.update.fractals
    if fractals is not None:
        element, dims = in_nz(old, fractals)
        return tensor(Element(*resolve(old, element.index).seen), dims)
    return tensor(Element(old, cache.update.index), (cache.batch, (), cache.slot, cache.width))


def new_cache(like: Node, dtype: torch.dtype, *sizes: Size) -> Expression:
    """A new, empty cache on the device of `like`, into which only the appended rows are written."""
    return Call(aten.empty.memory_format, list(sizes), dtype=dtype, device=like.meta["val"].device)


def positions_and_caches(
    latent: CacheRoles, keys: CacheRoles | None
) -> tuple[Expression, Expression, Expression]:
    """Positions, and the caches of latents and rotary keys before the write. Without keys, theirs has no columns."""
    others = () if keys is None else (keys,)
    found = ByTarget(*(positions(latent, *others, is_skipped=is_skipped) for is_skipped in (False, True)))
    if keys is not None:
        return found, old_cache(latent), old_cache(keys)
    old, sizes = latent.update.old, [_size(latent.batch), 1, _size(latent.slot), 0]
    if latent.update.fractals is not None:
        sizes = [_size(dim) for dim in in_nz(old, latent.update.fractals)[1]]
        sizes[1] = 0
    return found, old_cache(latent), new_cache(old, old.meta["val"].dtype, *sizes)


def _size(axes: Sequence[Axis]) -> Size:
    return product(axis.size for axis in axes)


def positions(cache: CacheRoles, *others: CacheRoles, is_skipped: bool = False) -> Expression:
    """The positions of the rows, [B or 1, S] int64, counted from the start. `others` are written at equal positions.

    A position that the program refuses is replaced by one beyond the end, so that the new write refuses it too. With
    `is_skipped`, a position outside the cache becomes negative, for a write that skips it."""
    match cache.update.where:
        case At(slot):
            found = _slots(cache, slot, is_skipped)
        case InBlocks(block, offset):
            found = _slots_in_blocks(cache, block, offset, is_skipped)
        case WholeBlocks(block, offset):
            found = _slots_of_blocks(cache, block, offset, is_skipped)
        case From(start):
            device = cache.update.rows.meta["val"].device
            options = {"start": start, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
            counted = Call(torch.ops.prims.iota.default, _size(cache.token), **options)
            return Call(aten.unsqueeze.default, counted, 0)
        case Appended():
            raise AssertionError("appended rows have no positions")
    alike = (part.origin for other in others for part in _positioned(other))
    return Representative(found, tuple(alike))


def _positioned(cache: CacheRoles) -> tuple[Element, ...]:
    """The tensors that hold the positions of the rows."""
    return tuple(cache.update.where.elements)


def batch_of_positions(cache: CacheRoles) -> Size:
    """B of `positions`: 1 if all sequences are written to the same positions."""
    is_own = any(axis in part.axes for part in _positioned(cache) for axis in cache.batch)
    return _size(cache.batch) if is_own else 1


def _check_apart(cache: CacheRoles) -> None:
    """Raises NoMatch if tokens share a position. Duplicate positions: which row is kept is undefined."""
    parts, where = _positioned(cache), cache.update.where
    own = where.offset.axes if isinstance(where, WholeBlocks) else frozenset()
    if any(axis.size != 1 and axis not in own.union(*(part.axes for part in parts)) for axis in cache.token):
        raise NoMatch("all tokens of a sequence are written to one position", parts[0].origin)


def _slots(cache: CacheRoles, slot: Element, is_skipped: bool) -> Expression:
    """Positions that the program computes."""
    _check_apart(cache)
    return _checked(cache, slot, cache.row, _slot_sizes(cache), is_skipped)


def _slots_of_blocks(cache: CacheRoles, block: Element, offset: Index, is_skipped: bool) -> Expression:
    """The slots of whole blocks, block for block. A number outside the cache makes every slot of its block one."""
    _check_apart(cache)
    number, *inner = _slot_sizes(cache)
    size, within = product(inner), axes(offset, "the rows of a block", cache.update.node)
    blocks = tuple(axis for axis in cache.token if axis not in within)
    first = _checked(cache, block, (cache.batch, blocks, ()), (number,), is_skipped)
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": block.origin.meta["val"].device}
    rows = Call(torch.ops.prims.iota.default, size, **options, requires_grad=False)
    slots = Call(aten.add.Tensor, Call(aten.mul.Tensor, first, size), rows)
    return Call(aten.reshape.default, slots, [batch_of_positions(cache), -1])


def _checked(cache: CacheRoles, slot: Element, dims: Dims, sizes: Sequence[Size], is_skipped: bool) -> Expression:
    """Numbers of slots or blocks, counted from the start.

    The new write checks one bound itself: the end of the cache if it refuses rows, the start if it skips them."""
    device = slot.origin.meta["val"].device
    given = tensor(slot, dims, dtype=torch.int64)
    is_counted, is_inside = proved(integer_sum(slot), product(sizes))
    if _wraps(cache.update) and not is_counted:
        given = counted_from_start(given, sizes)
    if is_skipped:
        return given if is_inside else or_else([is_below(given, sizes)], given, -1, device)
    return given if is_counted else or_else([is_from_start(given)], given, count(sizes), device)


def _slots_in_blocks(cache: CacheRoles, block: Element, offset: Element, is_skipped: bool) -> Expression:
    """The slots at offsets within blocks. Both bounds of block and offset are checked here."""
    _check_apart(cache)
    sizes, device = _slot_sizes(cache), block.origin.meta["val"].device
    counted = [
        counted_from_start(tensor(part, cache.row, dtype=torch.int64), (size,))
        for part, size in zip((block, offset), sizes, strict=True)
    ]
    sides = [is_below(part, (size,)) for part, size in zip(counted, sizes, strict=True)]
    sides += map(is_from_start, counted)
    slots = Call(aten.add.Tensor, Call(aten.mul.Tensor, counted[0], sizes[1]), counted[1])
    return or_else(sides, slots, -1 if is_skipped else count(sizes), device)


def _slot_sizes(cache: CacheRoles) -> tuple[Size, ...]:
    """The sizes of the dimensions over which slots are counted."""
    return tuple(extent(part) for part in cache.update.index[cache.update.dim : cache.update.behind])


def block_table(rows: Axes, pages: Axes, found: Paged, other: Paged) -> Expression:
    """The page table [B, Blocks] of two caches.

    A negative number that the program refuses is replaced by one beyond the end, which the operator refuses too."""
    given = tensor(found.table, (rows, pages), expand=True)
    if found.wraps and other.wraps:
        return given
    device = found.table.origin.meta["val"].device
    refusing = or_else([is_from_start(given)], given, extent(found.block), device, found.table.dtype)
    return ByTarget(refusing=refusing, skipping=given)


def replaced_cache(cache: CacheRoles, out: Expression) -> Replaced:
    """Replace the written cache by the one that an operator returns, in the shape of `old_cache`."""
    node, fractals = cache.update.node, cache.update.fractals
    if fractals is not None:
        element, dims = in_nz(node, fractals)
        return replaced(node, element.index, result(out, dims))
    return replaced(cache.update.node, cache.update.index, result(out, (cache.batch, (), cache.slot, cache.width)))


def replaced_rows(cache: CacheRoles, rows: Part) -> Replaced:
    """Replace the new rows by the rows that an operator returns."""
    return replaced(cache.update.rows, cache.update.place, rows)
