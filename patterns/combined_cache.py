"""One cache for latents and rotary keys that is written in two parts, as one write of joined rows.

    cache[..., :Hckv][position] = latent;  cache[..., Hckv:][position] = k_rope
    ->  cache[position] = cat(latent, k_rope)

A single write does not copy the cache, and its rows are those that the prolog computes. Spellings: slices of the cache,
or views of these, written by index_copy, index_put, scatter or a slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HCKV, Case, Layer
from mla_fx.rule import CallPattern, Match, NoMatch, Plan, Rule
from mla_fx.rule.caches import (
    WRITES,
    CacheRoles,
    CacheUpdate,
    batch_of_positions,
    cache_roles,
    cache_update,
    check_same_write,
    positions,
)
from mla_fx.rule.operands import ATTENTION, Call, Expression, first_node, joined, replacing, result, tensor
from mla_fx.rule.readings import (
    Index,
    Reading,
    Size,
    args_of,
    composite,
    element_of,
    extent,
    fresh,
    fresh_index,
    of_axis,
    renamed,
    resolve,
    shape_of,
    shifted,
    written_slice,
)

aten = torch.ops.aten


class _InTwo(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor
        self.register_buffer("cache", torch.cat((self.kv_cache, self.kr_cache), -1))

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        latents, keys = self.cache[..., :HCKV], self.cache[..., HCKV:]
        latents.index_copy_(2, position, latent)
        keys.index_copy_(2, self.other(position), k_rope)
        return latents, keys

    def other(self, position: Tensor) -> Tensor:
        return position


class _TwoPositions(_InTwo):
    def other(self, position: Tensor) -> Tensor:
        return position - 1


class CombinedCache(Rule):
    stage = "context"
    targets = (aten.slice_scatter.default,)
    pattern = CallPattern()
    accepts = (Case("columns written in two parts", _InTwo, {"mla_prolog": 1, "latent_attention": 1}),)
    rejects = (Case("columns written to two positions", _TwoPositions, because="written to different positions"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        """Columns written into a cache that other columns were written into before, in a graph whose attention
        fused."""
        if not graph.find_nodes(op="call_function", target=ATTENTION):
            return
        for node in super().anchors(graph):
            base, columns = (element_of(operand).origin for operand in args_of(node)[:2])
            if _puts_columns(node) and _puts_columns(base) and columns.target in WRITES:
                yield node

    def rewrite(self, match: Match) -> Plan:
        """Two updates of adjacent columns, of one cache and at the same positions."""
        node = match.reading(Reading, "call").node
        ranges, index = _columns(node), fresh_index(node)
        if len(ranges) != 2:
            raise NoMatch(f"{len(ranges)} parts of a cache's columns are written, expected two", node)
        one, other = (_update(node, (*index[:-1], shifted(fresh(stop - start), start))) for start, stop in ranges)
        if one.index[:-1] != other.index[:-1]:
            raise NoMatch("the two parts of a cache's columns are written along different dimensions", node)
        first, second = cache_roles(one), cache_roles(other.beside(one))
        check_same_write(first, second)
        mine, theirs = (resolve(part.update.old, part.update.index) for part in (first, second))
        old = joined(mine, first.width, theirs, second.width)
        if old is None or old.axis.size != shape_of(node)[-1]:
            raise NoMatch("the two parts are not all the columns of one cache", node)
        dims, dtype = (first.batch, first.slot, (old.axis,)), old.element.dtype
        rows = [
            tensor(part.update.row, (first.batch, first.token, part.width), dtype=dtype, expand=True)
            for part in (first, second)
        ]
        cache, joined_rows = tensor(old.element, dims), Call(aten.cat.default, rows, -1)
        written = result(Call(aten.index_put.default, cache, _indices(first), joined_rows), dims)
        replacements = [replacing(node, (*index[:-1], of_axis(old.axis)), written)]
        start: Size = 0
        for part in (first, second):
            columns = shifted(composite(part.width), start)
            own = replace(written, index=(composite(part.batch), composite(part.slot), columns))
            replacements.insert(-1, replacing(part.update.node, part.update.index, own))
            start += extent(columns)
        return Plan(*replacements)


def _puts_columns(node: Node) -> bool:
    return node.target is aten.slice_scatter.default and written_slice(node)[0] == len(shape_of(node)) - 1


def _columns(node: Node) -> list[tuple[Size, Size]]:
    """The bounds of the written columns, and of those before and after them."""
    bounds = written_slice(node)[1]
    if bounds is None or bounds[2] != 1:
        raise NoMatch("the written columns are not known", node)
    start, stop, _ = bounds
    ranges = (0, start), (start, stop), (stop, shape_of(node)[-1])
    return [(begin, end) for begin, end in ranges if begin != end]


def _update(node: Node, index: tuple[Index, ...]) -> CacheUpdate:
    """The update of some columns, in the axes of the whole."""
    element = resolve(node, index)
    if element.roundings or element.dtype != element.node.meta["val"].dtype:
        raise NoMatch("a part of a cache's columns is cast between the two writes", node)
    found = cache_update(element)
    own = {axis: part for mine, part in zip(found.index, element.index, strict=True) for axis in mine.axes}
    return renamed(found, own)


def _indices(cache: CacheRoles) -> list[Expression | None]:
    """The positions of rows, as indices of a cache [B, T, width]."""
    found, count = positions(cache), batch_of_positions(cache)
    if count == 1:
        return [None, Call(aten.squeeze.dim, found, 0)]
    options = {"start": 0, "step": 1, "dtype": torch.int64, "device": first_node(found).meta["val"].device}
    sequences = Call(torch.ops.prims.iota.default, count, **options, requires_grad=False)
    return [Call(aten.unsqueeze.default, sequences, 1), found]
