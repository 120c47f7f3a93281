"""New rows entering a cache, in any spelling: index_copy, index_put, scatter, a slice or a row assigned, cat."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import label_of, name_of
from mla_fx.readings.integers import INTEGERS, counted_steps, whole_number

from .axes import ZERO, Axis, Digit, Index, axes_of, combine, composite, digits_of, extent, fresh, of_axis, shifted
from .cache_places import Appended, At, CacheUpdate, From, InBlocks, WholeBlocks, in_fractals
from .calls import args_of, argument, operands_of, options_of
from .element import Element, computed_from, element_of, operand, resolve
from .equal_sizes import EQUAL, meant, unproved
from .reading import renamed
from .same_value import same_value
from .sizes import Size, product, strides_of
from .views import broadcast, cat_dim, fresh_index, move, pieces, shape_of, written_position, written_slice

aten = torch.ops.aten

REMAINDERS = frozenset({aten.remainder.Scalar, aten.remainder.Tensor})  # has the sign of the divisor
POSITIONED = frozenset(
    {aten.index_copy.default, aten.index_put.default, aten._unsafe_index_put.default, aten.scatter.src}
)
WRITES = frozenset({*POSITIONED, aten.slice_scatter.default, aten.select_scatter.default})
NEGATIVE = "the cache is written from a position that may be negative, which counts from the end"
WHERE = "the cache is written by a boolean mask, not at positions"


def cache_update(element: Element) -> CacheUpdate:
    """The first of `cache_updates`."""
    return next(cache_updates(element))


def cache_updates(element: Element) -> Iterator[CacheUpdate]:
    """Read the value that contains `element` as an updated cache, in the columns that the element reads: by whole
    blocks and by rows, which only the reader of the rows can tell apart.

    Raises NoMatch if it is not one."""
    node, index = element.node, fresh_index(element.node)
    part = Index(0, element.index[-1].terms) if index else ZERO
    width = extent(part)
    if not index or width == shape_of(node)[-1] or digits_of(part) is None:
        yield from _by_blocks_and_rows(_update(node, index))
        return
    columns = fresh(width)
    for update in _by_blocks_and_rows(_update(node, (*index[:-1], shifted(columns, element.index[-1].offset)))):
        yield _of_columns(update, columns)


def _by_blocks_and_rows(update: CacheUpdate) -> Iterator[CacheUpdate]:
    """An update at positions along one dimension, as one of whole blocks if it may be one, and as it is; and one of
    blocks as one of FRACTAL_NZ."""
    at, lead, dim = update.where, axes_of(update.token), update.dim
    paged = {dim + 1: update} if update.is_paged and update.fractals is None else {}
    if isinstance(at, At) and not update.is_paged and lead is not None:
        inner = (row for row in range(update.behind, len(update.index) - 1) if update.index[row].axis)
        paged = {row: _of_whole_blocks(update, at, lead, row) for row in inner}
        yield from list(paged.values())[:1]
    yield update
    for row, found in paged.items():
        with contextlib.suppress(NoMatch):
            yield in_fractals(found, dim, row)


def _of_whole_blocks(update: CacheUpdate, at: At, lead: tuple[Axis, ...], inner: int) -> CacheUpdate:
    """The update as `cache[blocks] = rows`, where dimension `inner` counts the rows of a block."""
    axes = (*lead, *update.index[inner].axes)
    sizes = [axis.size for axis in axes]
    token = Axis(product(sizes))
    parts = [combine(0, [(Digit(token, *part), 1)]) for part in zip(strides_of(sizes), sizes, strict=True)]
    names = dict(zip(axes, parts, strict=True))
    place = renamed(update.place, names)
    where = WholeBlocks(renamed(at.slot, names), parts[-1], at.wraps)
    row, across = resolve(update.rows, place), inner - update.dim + 1
    return replace(update, place=place, row=row, token=of_axis(token), where=where, across=across)


def _of_columns(update: CacheUpdate, columns: Index) -> CacheUpdate:
    """The update of some columns only, whose rows are not part of wider rows but concatenated with others.

    The program then decides where the wider rows go, as it does for appended rows."""
    rows, place = update.rows, update.place
    if update.fractals is not None:
        raise NoMatch("some columns are read of a cache that holds those of a row in two dimensions", update.node)
    while place[-1] != columns or shape_of(rows)[-1] != extent(columns):
        further = move(rows, place)
        if further is None:
            raise NoMatch("the written rows are not a concatenation of latent and rotary key", rows)
        rows, place = further
    index = (*update.index[:-1], columns)
    return replace(update, index=index, rows=rows, place=place, where=Appended())


def _update(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    if node.target is aten.cat.default:
        return _appended(node, index)
    if node.target is aten.slice_scatter.default:
        return _overwritten(node, index)
    if node.target is aten.select_scatter.default:
        return _overwritten_at_one(node, index)
    if node.target is aten.index_copy.default:
        _, dim, where, rows = args_of(node)
        return _at_positions(node, index, (dim % len(index),), (where,), rows)
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        return _index_put(node, index)
    if node.target is aten.scatter.src:
        return _scattered(node, index)
    if is_written_where(node):
        raise NoMatch(WHERE, node)
    raise NoMatch(f"expected a cache that is written, found {name_of(node)}", node)


def is_written_where(node: Node) -> bool:
    """Whether this is `where(condition, rows, cache)`: a graph input, replaced where a condition holds."""
    if node.target is not aten.where.self:
        return False
    chosen = (value for value in args_of(node)[1:] if isinstance(value, Node) and shape_of(value) == shape_of(node))
    return any(element_of(value).origin.op == "placeholder" for value in chosen)


def _rows(index: tuple[Index, ...], dim: int, rows: Node) -> tuple[Index, tuple[Index, ...]]:
    token = fresh(shape_of(rows)[dim])
    return token, (*index[:dim], token, *index[dim + 1 :])


def _appended(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    dim, joined = cat_dim(node), pieces(node)
    if len(joined) != 2 or dim == len(index) - 1:
        raise NoMatch("expected one cat of the old and the new rows", node)
    (old, _, _), (rows, _, _) = joined
    token, place = _rows(index, dim, rows)
    return CacheUpdate(node, index, dim, old, rows, place, resolve(rows, place), token, Appended())


def _overwritten(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    old, rows = args_of(node)[:2]
    dim, bounds = written_slice(node)
    if bounds is None:
        raise NoMatch(NEGATIVE, node)
    start, _, step = bounds
    if step != 1:
        raise NoMatch(f"the cache is written in steps of {step}, expected consecutive rows", node)
    # the slice holds all rows, so if there is a row, the slice's start was not clamped to the end of the cache
    token, place = _rows(index, dim, rows)
    return CacheUpdate(node, index, dim, old, rows, place, resolve(rows, place), token, From(start))


def _overwritten_at_one(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    """`cache[:, position] = row`."""
    old, rows = args_of(node)[:2]
    dim, position = written_position(node)
    if position is None:
        raise NoMatch(NEGATIVE, node)
    place = (*index[:dim], *index[dim + 1 :])
    return CacheUpdate(node, index, dim, old, rows, place, resolve(rows, place), ZERO, From(position))


def _index_put(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    old, places, rows = args_of(node)[:3]
    if argument(node, 3, "accumulate", False):
        raise NoMatch("the cache is added to, not written", node)
    used = [dim for dim, where in enumerate(places) if where is not None]
    if any(places[dim].meta["val"].dtype not in INTEGERS for dim in used):
        raise NoMatch(WHERE, node)
    if used == [0, 1] and _counts_sequences(places[0], old):
        return _per_sequence(node, index, old, places, rows)
    if len(used) not in (1, 2):
        raise NoMatch("the cache is written at positions along several dimensions", node)
    found = _at_positions(node, index, used, [places[dim] for dim in used], rows)
    return found if used[-1] - used[0] < len(used) else in_fractals(found, *used)


def _at_positions(
    node: Node, index: tuple[Index, ...], dims: Sequence[int], places: Sequence[Node], rows: Node
) -> CacheUpdate:
    """`cache[:, :, positions] = rows`, or `cache[blocks, offsets] = rows`; the rows may lack leading dimensions of one.
    They come first in the written values if the two dimensions are not adjacent."""
    old, first = args_of(node)[0], dims[0]
    wide, *narrow = sorted(map(shape_of, places), key=len, reverse=True)
    for other in narrow:
        aligned = (*[1] * (len(wide) - len(other)), *other)
        wide = tuple(size if size != 1 else beside for size, beside in zip(wide, aligned, strict=True))
    sizes, others = shape_of(old), [each for each in range(len(index)) if each not in dims]
    is_adjacent = dims[-1] - first < len(dims)
    before, behind = (others[:first], others[first:]) if is_adjacent else ([], others)
    lead = _rows_at(node, rows, [sizes[each] for each in before], wide, [sizes[each] for each in behind])
    place = broadcast(rows, (*(index[each] for each in before), *lead, *(index[each] for each in behind)))
    numbers = [operand(where, lead) for where in places]
    slot = numbers[0] if len(numbers) == 1 else _slot(numbers[0], numbers[1], sizes[dims[1]])
    at = InBlocks(*numbers) if slot is None else At(slot, wraps=node.target is not aten.index_copy.default)
    token = composite([axis for part in lead for axis in axes_of(part) or ()])  # several dimensions of rows as one
    return CacheUpdate(node, index, first, old, rows, place, resolve(rows, place), token, at, across=len(dims))


def _slot(block: Element, offset: Element, size: Size) -> Element | None:
    """The slot that both are computed from, if they are its block and its offset in the block, rounded down."""
    divided, rest = block.node, offset.node
    if divided.target is aten.div.Tensor_mode and options_of(divided).get("rounding_mode") != "floor":
        return None
    if divided.target not in (aten.div.Tensor_mode, aten.floor_divide.default) or rest.target not in REMAINDERS:
        return None
    if not whole_number(args_of(divided)[1]) == whole_number(args_of(rest)[1]) == size:
        return None
    slot, other = (operand(args_of(part.node)[0], part.index) for part in (block, offset))
    return slot if same_value(slot, other) and slot.origin.meta["val"].dtype in INTEGERS else None


def _rows_at(
    node: Node, rows: Node, before: Sequence[Size], written: tuple[Size, ...], behind: Sequence[Size]
) -> tuple[Index, ...]:
    """An index for each dimension that is written at positions. The rows fill what is written; they may lack leading
    dimensions of one."""
    expected = (*before, *written, *behind)
    missing = len(expected) - len(shape_of(rows))
    sizes = (*[1] * missing, *shape_of(rows))
    if missing < 0 or sizes != expected:
        raise NoMatch(_why_unlike(node, rows, sizes, expected) or "the rows written are broadcast into the cache", node)
    return tuple(map(fresh, written))


def _why_unlike(node: Node, rows: Node, sizes: Sequence[Size], expected: Sequence[Size]) -> str:
    """Say which size of the rows is not known to be that of what is written; empty if they are known to differ."""
    for size, places in zip(sizes, expected, strict=False):
        if size in (places, 1) or (isinstance(size, int) and isinstance(places, int)):
            continue
        for name, dim in _positions_of_size(node, rows, places):
            number = f"{name} has {places} rows, but {size} are written{meant(node.graph, size)}"
            return f"{number}: torch._dynamo.mark_dynamic({name}, {dim}) makes both dynamic"
        return "the rows written may not fill their places in the cache" + unproved(node.graph, places, EQUAL, size)
    return ""


def _positions_of_size(node: Node, rows: Node, size: Size) -> Iterator[tuple[str, int]]:
    """The graph inputs that positions are computed from, with a dimension of this known size."""
    positions = [value for value in operands_of(node) if value not in (args_of(node)[0], rows)]
    for found in (value for position in positions for value in computed_from(position)):
        if isinstance(size, int) and found.op == "placeholder" and size in shape_of(found):
            yield label_of(found), shape_of(found).index(size)


def _per_sequence(node: Node, index: tuple[Index, ...], old: Node, places: list[Node], rows: Node) -> CacheUpdate:
    """`cache[arange(batch), positions] = rows`: each sequence has its own positions."""
    batch_places, positions = places[:2]
    sequence = index[0]
    lead: tuple[Index, ...] = (sequence,)
    token = ZERO
    rank = max(len(shape_of(place)) for place in places[:2])
    if rank > 2:
        raise NoMatch("the cache positions depend on more than sequences and tokens", node)
    if rank == 2:
        token = fresh(shape_of(positions)[-1])
        lead = (sequence, token)
    if operand(batch_places, lead).index != (sequence,):
        raise NoMatch("the cache is written at sequences that are not 0, 1, 2, ...", node)
    sizes = shape_of(old)
    _rows_at(node, rows, sizes[:1], (shape_of(positions)[-1],) if rank == 2 else (), sizes[2:])
    place = broadcast(rows, (*lead, *index[2:]))
    at = At(operand(positions, lead), wraps=True)
    return CacheUpdate(node, index, 1, old, rows, place, resolve(rows, place), token, at)


def _counts_sequences(where: Node, old: Node) -> bool:
    """Whether this is `arange(batch)`, as a column or as a row."""
    counted = element_of(where).origin
    return counted_steps(counted) == (0, 1) and shape_of(counted) == shape_of(old)[:1]


def _scattered(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    """`cache.scatter(dim, positions expanded over the row, rows)`."""
    old, dim, where, rows = args_of(node)
    dim = dim % len(index)
    token, place = _rows(index, dim, rows)
    if shape_of(where) != shape_of(rows) or _without(shape_of(rows), dim) != _without(shape_of(old), dim):
        because = _why_unlike(node, rows, shape_of(rows), shape_of(where))
        raise NoMatch(because or "only some of the rows are scattered into the cache", node)
    position = resolve(where, place)
    if not position.axes <= frozenset(axis for part in (*index[:dim], token) for axis in part.axes):
        raise NoMatch("the elements of one row are scattered to different positions", node)
    at = At(position, wraps=False)
    return CacheUpdate(node, index, dim, old, rows, place, resolve(rows, place), token, at)


def _without(sizes: tuple[Size, ...], dim: int) -> tuple[Size, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
