"""Written caches as operands: the axes of a cache, the positions of its new rows, also those that are out of its
bounds, what its results replace, and pages in FRACTAL_NZ, [Blocks, Columns/n0, BlockSize, n0], where n0 elements take
32 bytes."""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import ZERO, Axes, Axis, Dims, Index, axes, extent, fresh, shifted
from mla_fx.readings.cache_places import Appended, At, CacheUpdate, Fractals, From, InBlocks, WholeBlocks
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.integers import IntegerSum, integer_sum
from mla_fx.readings.paged import Paged
from mla_fx.readings.sizes import Size, plain, product, size_of, strides_of
from mla_fx.readings.views import shape_of

from .materialize import size_over, tensor
from .plan import ByTarget, Call, Expression, Replacement, Representative, result
from .replacement import replacing

aten = torch.ops.aten


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


def positions_and_caches(latent: CacheRoles, keys: CacheRoles | None) -> tuple[Expression, Expression, Expression]:
    """Positions, and the caches of latents and rotary keys before the write. Without keys, theirs has no columns."""
    others = () if keys is None else (keys,)
    found = slots_by_target(latent, *others)
    if keys is not None:
        return found, old_cache(latent), old_cache(keys)
    old, sizes = latent.update.old, [size_over(latent.batch), 1, size_over(latent.slot), 0]
    if latent.update.fractals is not None:
        sizes = [size_over(dim) for dim in in_nz(old, latent.update.fractals)[1]]
        sizes[1] = 0
    return found, old_cache(latent), new_cache(old, old.meta["val"].dtype, *sizes)


def slots_by_target(cache: CacheRoles, *others: CacheRoles) -> Expression:
    """`positions` for a target that refuses those outside the cache, or for one that skips them."""
    return ByTarget(*(positions(cache, *others, is_skipped=is_skipped) for is_skipped in (False, True)))


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
            counted = Call(torch.ops.prims.iota.default, size_over(cache.token), **options)
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
    return size_over(cache.batch) if is_own else 1


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


def block_table(rows: Axes, pages: Axes, found: Paged, *others: Paged) -> Expression:
    """The page table [B, Blocks] of caches.

    A negative number that the program refuses is replaced by one beyond the end, which the operator refuses too."""
    given = tensor(found.table, (rows, pages), expand=True)
    if all(one.wraps for one in (found, *others)):
        return given
    device = found.table.origin.meta["val"].device
    refusing = or_else([is_from_start(given)], given, extent(found.block), device, found.table.dtype)
    return ByTarget(refusing=refusing, skipping=given)


def replacing_cache(cache: CacheRoles, out: Expression, heads_at: int = 1) -> Replacement:
    """Replace the written cache, or the rows appended to it, by what an operator returns. Its one head is in dimension
    `heads_at`."""
    update = cache.update
    if update.fractals is not None:
        element, in_fractals = in_nz(update.node, update.fractals)
        return replacing(update.node, element.index, result(out, in_fractals))
    dims = [cache.batch, cache.token if update.is_appended else cache.slot, cache.width]
    dims.insert(heads_at, ())
    old = (update.rows, update.place) if update.is_appended else (update.node, update.index)
    return replacing(*old, result(out, dims))


def count(sizes: Sequence[Size]) -> Any:
    """The number of slots, computed from the cache's own sizes, so the graph need not know how these are computed."""
    if all(isinstance(size, int) for size in sizes):
        return product(sizes)
    return functools.reduce(lambda *both: Call(operator.mul, *both), sizes)


def proved(position: IntegerSum, slots: Size) -> tuple[bool, bool]:
    """Whether no position is negative, and whether none is beyond the end."""
    excesses = IntegerSum(ZERO).plus(position, -1), position.plus(IntegerSum(Index(slots - 1)), -1)
    start, end = (excess.is_at_most_zero for excess in excesses)
    return start, end


def counted_from_start(given: Expression, sizes: Sequence[Size]) -> Expression:
    """Positions counted from the start. In an indexed assignment, negative ones count from the end."""
    is_negative = Call(aten.lt.Scalar, given, 0)
    return Call(aten.where.self, is_negative, Call(aten.add.Tensor, given, count(sizes)), given)


def is_below(place: Expression, sizes: Sequence[Size]) -> Expression:
    return Call(aten.lt.Scalar, place, count(sizes))


def is_from_start(place: Expression) -> Expression:
    return Call(aten.ge.Scalar, place, 0)


def or_else(
    conditions: Sequence[Expression],
    given: Expression,
    other: Any,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Expression:
    """`given` where all conditions hold, and `other` elsewhere."""
    holds = functools.reduce(lambda *both: Call(aten.logical_and.default, *both), conditions)
    rest = Call(aten.full.default, [], other, dtype=dtype, device=device, pin_memory=False)
    return Call(aten.where.self, holds, given, rest)


def in_nz(node: Node, fractals: Fractals) -> tuple[Element, Dims]:
    """An element of a value, and the axes of its dimensions in the order of FRACTAL_NZ."""
    dims = [fresh(shape_of(node)[dim]) for dim in fractals.dims]
    return Element(node, fractals.index(node, dims)), [axes(part, "the cache", node) for part in dims]


def check_memory(element: Element, dims: Dims) -> None:
    """Raises NoMatch unless the memory of a value is in FRACTAL_NZ, whose dimensions run over the axes `dims`."""
    node, index, _ = element.as_operand
    value = node.meta["val"]
    sizes = [product(axis.size for axis in dim) for dim in dims]
    fractal = 32 // value.dtype.itemsize
    if sizes[3] != fractal:
        has = f"FRACTAL_NZ has {fractal} of {value.dtype}"
        raise NoMatch(f"{sizes[3]} columns of a row lie side by side in the cache; {has}", node)
    for dim, step in list(zip(dims, strides_of(sizes), strict=True))[1:]:
        inner = strides_of([axis.size for axis in dim])
        if any(_step(node, index, axis) != plain(step * each) for axis, each in zip(dim, inner, strict=True)):
            shape = f"[Blocks, Columns/{fractal}, BlockSize, {fractal}]"
            raise NoMatch(f"the cache is not in FRACTAL_NZ, which lies in memory as {shape}", node)


def _step(node: Node, index: tuple[Index, ...], axis: Axis) -> Size:
    """The distance in memory of neighbours along an axis."""
    strides = [size_of(stride) for stride in node.meta["val"].stride()]
    found = (stride * step for part, stride in zip(index, strides, strict=True) for digit, step in part.terms
             if digit.axis is axis)  # fmt: skip
    return plain(sum(found, 0))
