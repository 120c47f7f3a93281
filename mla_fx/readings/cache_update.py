"""New rows entering a cache, in any spelling: index_copy, index_put, scatter, a slice or a row written over, cat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import ZERO, Axis, Index, extent, fresh
from .element import Element, operand, resolve
from .reading import Reading, renamed
from .sizes import Size
from .views import args_of, argument, cat_dim, fresh_index, name_of, pieces, shape_of, written_position, written_slice

aten = torch.ops.aten

INTEGERS = frozenset({torch.int64, torch.int32})
POSITIONED = frozenset(
    {aten.index_copy.default, aten.index_put.default, aten._unsafe_index_put.default, aten.scatter.src}
)
WRITES = frozenset({*POSITIONED, aten.slice_scatter.default, aten.select_scatter.default})
NEGATIVE = "the cache is overwritten from a position that may be negative, and count from the end"


@dataclass(frozen=True)
class CacheUpdate(Reading):
    """Rows of a value written into it along dimension `dim`; `index` are indices of its own for the whole value.

    `row` is an element of the new rows, `token` the index along which they are counted. `position` says where a row
    goes: an element of the index tensor, or a size for the first row, which may be a symbol; None where rows are
    appended by `cat`. With `wraps` a negative position counts from the end."""

    index: tuple[Index, ...]
    dim: int
    old: Node
    rows: Node
    row: Element
    token: Index
    position: Element | Size | None
    wraps: bool = False

    def beside(self, other: CacheUpdate) -> CacheUpdate:
        """This update with its rows counted as those of another cache. Raises NoMatch if they are not as many."""
        if len(self.index) != len(other.index) or self.dim != other.dim:
            raise NoMatch("latent and rotary key are cached in different layouts", self.node)
        mine, theirs = ((*update.index[:-1], update.token) for update in (self, other))
        names: dict[Axis, Index] = {}
        for own, same in zip(mine, theirs, strict=True):
            if extent(own) != extent(same):
                raise NoMatch("latent and rotary key are cached in rows or slots of different numbers", self.node)
            names.update(dict.fromkeys(own.axes, same))
        return renamed(self, names)


def cache_update(element: Element) -> CacheUpdate:
    """Reads the value that `element` is part of as an updated cache. Raises NoMatch if it is none."""
    node = element.node
    index = fresh_index(node)
    if node.target is aten.cat.default:
        return _appended(node, index)
    if node.target is aten.slice_scatter.default:
        return _overwritten(node, index)
    if node.target is aten.select_scatter.default:
        return _overwritten_at_one(node, index)
    if node.target is aten.index_copy.default:
        _, dim, where, rows = args_of(node)
        return _at_positions(node, index, dim % len(index), where, rows)
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        return _index_put(node, index)
    if node.target is aten.scatter.src:
        return _scattered(node, index)
    raise NoMatch(f"expected a cache that is written, found {name_of(node)}", node)


def _rows(index: tuple[Index, ...], dim: int, rows: Node) -> tuple[Index, tuple[Index, ...]]:
    token = fresh(shape_of(rows)[dim])
    return token, (*index[:dim], token, *index[dim + 1 :])


def _appended(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    dim, joined = cat_dim(node), pieces(node)
    if len(joined) != 2 or dim == len(index) - 1:
        raise NoMatch("expected the old rows and the new ones in one cat", node)
    (old, _, _), (rows, _, _) = joined
    token, row = _rows(index, dim, rows)
    return CacheUpdate(node, index, dim, old, rows, resolve(rows, row), token, None)


def _overwritten(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    old, rows = args_of(node)[:2]
    dim, bounds = written_slice(node)
    if bounds is None:
        raise NoMatch(NEGATIVE, node)
    start, _, step = bounds
    if step != 1:
        raise NoMatch(f"the cache is overwritten in steps of {step}, expected neighbouring rows", node)
    # the slice holds all the rows, so that where there is one its start was not clamped to the end of the cache
    token, row = _rows(index, dim, rows)
    return CacheUpdate(node, index, dim, old, rows, resolve(rows, row), token, start)


def _overwritten_at_one(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    """`cache[:, position] = row`."""
    old, rows = args_of(node)[:2]
    dim, position = written_position(node)
    if position is None:
        raise NoMatch(NEGATIVE, node)
    row = resolve(rows, (*index[:dim], *index[dim + 1 :]))
    return CacheUpdate(node, index, dim, old, rows, row, ZERO, position)


def _index_put(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    old, places, rows = args_of(node)[:3]
    if argument(node, 3, "accumulate", False):
        raise NoMatch("the cache is added to, not written", node)
    used = [dim for dim, where in enumerate(places) if where is not None]
    if any(places[dim].meta["val"].dtype not in INTEGERS for dim in used):
        raise NoMatch("the cache is written where a condition holds, not at positions", node)
    if len(used) == 1:
        return _at_positions(node, index, used[0], places[used[0]], rows)
    if used == [0, 1]:
        return _per_sequence(node, index, old, places, rows)
    raise NoMatch("the cache is written at positions along several dimensions", node)


def _at_positions(node: Node, index: tuple[Index, ...], dim: int, where: Node, rows: Node) -> CacheUpdate:
    """`cache[:, :, positions] = rows`; leading dimensions of one may be missing from the rows."""
    old = args_of(node)[0]
    if len(shape_of(where)) != 1:
        raise NoMatch("the positions written are not one-dimensional", node)
    token = fresh(shape_of(where)[0])
    row = (*index[:dim], token, *index[dim + 1 :])
    _require_rows(node, rows, (*shape_of(old)[:dim], shape_of(where)[0], *shape_of(old)[dim + 1 :]))
    wraps = node.target is not aten.index_copy.default
    return CacheUpdate(node, index, dim, old, rows, operand(rows, row), token, resolve(where, (token,)), wraps)


def _require_rows(node: Node, rows: Node, expected: tuple[Size, ...]) -> None:
    """The rows fill what is written; only leading dimensions of one may be missing."""
    sizes = shape_of(rows)
    missing = expected[: len(expected) - len(sizes)]
    if sizes != expected[len(missing) :] or any(size != 1 for size in missing):
        raise NoMatch("the rows written are broadcast into the cache", node)


def _per_sequence(node: Node, index: tuple[Index, ...], old: Node, places: list[Node], rows: Node) -> CacheUpdate:
    """`cache[arange(batch), positions] = rows`: each sequence has positions of its own."""
    batch_places, positions = places[:2]
    sequence = index[0]
    lead: tuple[Index, ...] = (sequence,)
    token = ZERO
    rank = max(len(shape_of(place)) for place in places[:2])
    if rank > 2:
        raise NoMatch("the cache is written at positions of more than sequences and tokens", node)
    if rank == 2:
        token = fresh(shape_of(positions)[-1])
        lead = (sequence, token)
    counted = operand(batch_places, lead)
    counts_all = _counts_from_zero(counted.node) and shape_of(counted.node) == shape_of(old)[:1]
    if not counts_all or counted.index != (sequence,):
        raise NoMatch("the cache is written at sequences that are not simply counted", node)
    sizes = shape_of(old)
    written = sizes[:1] if len(lead) == 1 else (sizes[0], shape_of(positions)[-1])
    _require_rows(node, rows, (*written, *sizes[2:]))
    row = operand(rows, (*lead, *index[2:]))
    return CacheUpdate(node, index, 1, old, rows, row, token, operand(positions, lead), wraps=True)


def _counts_from_zero(node: Node) -> bool:
    """`arange(n)`: with a sequence axis as its index it counts the sequences of the cache, all of them."""
    if node.target is torch.ops.prims.iota.default:
        return bool(node.kwargs.get("start") == 0 and node.kwargs.get("step") == 1)
    if node.target is aten.arange.start_step:
        return bool(argument(node, 0, "start") == 0 and argument(node, 2, "step", 1) == 1)
    if node.target is aten.arange.start:
        return bool(argument(node, 0, "start") == 0)
    return node.target is aten.arange.default


def _scattered(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    """`cache.scatter(dim, positions expanded over the row, rows)`."""
    old, dim, where, rows = args_of(node)
    dim = dim % len(index)
    token, row = _rows(index, dim, rows)
    if shape_of(where) != shape_of(rows) or _without(shape_of(rows), dim) != _without(shape_of(old), dim):
        raise NoMatch("only a part of the rows is scattered into the cache", node)
    position = resolve(where, row)
    if not position.axes <= frozenset(axis for part in (*index[:dim], token) for axis in part.axes):
        raise NoMatch("the elements of one row are scattered to different positions", node)
    return CacheUpdate(node, index, dim, old, rows, resolve(rows, row), token, position)


def _without(sizes: tuple[Size, ...], dim: int) -> tuple[Size, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])
