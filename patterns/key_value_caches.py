"""Keys of every head, normalised, rotated in their first columns and written beside their values, as one operator.

    k_cache[index] = [rope(n[:Dr]), n[Dr:]],  n = rms_norm(k) gamma;  v_cache[index] = v

This is the key side of grouped-query attention with normalised keys, as in openPangu: no latents. The vendor has it in
the operator that writes latents, with an operand `v`. Caches have rows of heads, and both are written at equal slots.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from mla_fx.cases import KV_HEADS, WIDTH, B, Case, Heads, S, T
from mla_fx.rule import Match, NearestMiss, NoMatch, Plan, Rule
from mla_fx.rule.caches import (
    POSITIONED,
    At,
    CacheRoles,
    CacheUpdate,
    InBlocks,
    cache_roles,
    cache_updates,
    check_same_write,
    slots_by_target,
)
from mla_fx.rule.operands import Call, Expression, Replacement, joined, replacing, result, tables, tensor
from mla_fx.rule.readings import (
    Axes,
    Axis,
    Element,
    RmsNorm,
    Rope,
    Size,
    axes,
    element_of,
    of_axis,
    product,
    resolve,
    rms_norm,
    rope,
    seams,
    shape_of,
    shifted,
)

aten = torch.ops.aten
ROTARY = 4
NEARBY = (1, -1, 2, -2)  # where values are written, counted in writes from that of the keys


class _Keys(Heads):
    """Keys are normalised per head; their first columns are rotated by halves."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.7, 1.3, WIDTH))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        query, key, value = self.projected(x)
        angle = torch.arange(S).unsqueeze(-1) * 0.3 + torch.arange(ROTARY // 2)
        key = self.rotated(self.norm(key), angle.cos().unsqueeze(1), angle.sin().unsqueeze(1))
        self.write(torch.arange(B).unsqueeze(-1) * T + torch.arange(S), key, value)
        caches = (cache.flatten(0, 1)[: B * T].view(B, T, KV_HEADS, -1) for cache in (self.key_cache, self.value_cache))
        query, keys, values = (part.transpose(1, 2) for part in (query, *caches))
        return nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def norm(self, key: Tensor) -> Tensor:
        return key * torch.rsqrt(key.square().mean(-1, keepdim=True) + 1e-5) * self.gamma

    def rotated(self, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = key[..., :ROTARY].chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin, key[..., ROTARY:]), -1)


class _Interleaved(_Keys):
    def rotated(self, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = key[..., 0:ROTARY:2], key[..., 1:ROTARY:2]
        return torch.cat((one * cos - other * sin, other * cos + one * sin, key[..., ROTARY:]), -1)


ONE = {"kv_rmsnorm_rope_cache": 1}


class KeyValueCaches(Rule):
    stage = "cache"
    after = ("kv_rmsnorm_rope_cache",)
    tells_misses = False
    accepts = (Case("halves", _Keys, ONE), Case("interleaved columns", _Interleaved, ONE))

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return iter(_writes(graph) if graph.find_nodes(op="call_function", target=aten.rsqrt.default) else ())

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        keys = _by_slots(anchor)
        _Keyed.of(cache_roles(keys))  # most writes are of no such keys, and need no partner
        writes = _writes(anchor.graph)
        place = writes.index(anchor)
        for step in NEARBY:
            if 0 <= place + step < len(writes):
                other = writes[place + step]
                yield Match().read("keys", keys).read("values", _by_slots(other).beside(keys))

    def rewrite(self, match: Match) -> Plan:
        keys, values = (cache_roles(match.reading(CacheUpdate, name)) for name in ("keys", "values"))
        check_same_write(keys, values, "keys and values")
        read = _Keyed.of(keys)
        dtype = keys.update.rows.meta["val"].dtype
        token, heads = keys.token, keys.batch
        kv = tensor(read.norm.value, ((), heads, token, read.columns), dtype=dtype, expand=True)
        v = tensor(values.update.row, ((), heads, token, values.width), dtype=dtype, expand=True)
        cos, sin = tables(read.rotation, ("cos", "sin"), ((), (), token), expand=True)
        index = Call(aten.reshape.default, slots_by_target(keys, values), [-1])
        options = {
            "v": v,
            "epsilon": read.norm.epsilon,
            "gamma_after_cast": read.norm.gamma_after_cast,
            "cache_mode": "PA",
            "rope_layout": read.rotation.layout,
        }
        target, gamma = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default, tensor(read.norm.gamma.stored, (read.columns,))
        out = Call(target, kv, gamma, cos, sin, index, _pages(keys), _pages(values), **options)
        pairs = ((keys, 0), (values, 1))
        return Plan(*(_replaced(cache, Call(operator.getitem, out, place)) for cache, place in pairs))


@dataclass(frozen=True)
class _Keyed:
    """The norm of whole keys, along `columns`, and the rotation of their first columns."""

    norm: RmsNorm
    rotation: Rope
    columns: Axes

    @classmethod
    def of(cls, keys: CacheRoles) -> _Keyed:
        """Raises NoMatch if the rows are not normalised, or if their first columns are not rotated."""
        if len(keys.width) != 1:
            raise NoMatch("the columns of a key are not one dimension", keys.update.node)
        row, (width,) = keys.update.row, keys.width
        miss = NoMatch("expected rows whose first columns are rotated", keys.update.node)
        for cut in dict.fromkeys(cut for axis, cut in seams(row.origin, row.index) if axis is width):
            rotary, rest = Axis(cut), Axis(width.size - cut)
            try:
                first, second = row.at({width: of_axis(rotary)}), row.at({width: shifted(of_axis(rest), cut)})
                return cls._of_parts(first, rotary, second, rest)
            except NoMatch as found:
                miss = found
        raise miss

    @classmethod
    def _of_parts(cls, first: Element, rotary: Axis, second: Element, rest: Axis) -> _Keyed:
        for rotation in rope(first, rotary):
            along = axes(rotation.along, "the rotary columns", rotation.node)
            whole = joined(rotation.value, along, second, (rest,))
            if whole is None:
                continue
            norm = rms_norm(whole.element)
            over = [axis for part in norm.over for axis in axes(part, "the normalised columns", norm.node)]
            if over != [whole.axis] or norm.factor != 1.0:
                raise NoMatch("the norm is not over the columns of a key", norm.node)
            return cls(norm, rotation, (whole.axis,))
        raise NoMatch("the columns that are not rotated do not follow those that are", second.origin)


def _by_slots(node: Node) -> CacheUpdate:
    """Raises NoMatch if rows are not written by their slots."""
    found = [update for update in cache_updates(element_of(node)) if isinstance(update.where, (At, InBlocks))]
    if not found:
        raise NoMatch("rows are not written by slots", node)
    return found[0]


def _writes(graph: Graph) -> list[Node]:
    """All that are written at positions, in order."""
    found = [node for target in POSITIONED for node in graph.find_nodes(op="call_function", target=target)]
    return sorted(found)


def _pages(cache: CacheRoles) -> Expression:
    """[BlockNum, BlockSize, N, width], as it is stored, if it is stored in blocks."""
    old = Element(cache.update.old, cache.update.index)
    rows = tensor(old, (cache.slot, cache.batch, cache.width))
    sizes = [product(axis.size for axis in role) for role in (cache.slot, cache.batch, cache.width)]
    return Call(aten.reshape.default, rows, [*_blocks(cache, sizes[0]), *sizes[1:]])


def _blocks(cache: CacheRoles, slots: Size) -> tuple[Size, Size]:
    stored = shape_of(resolve(cache.update.old, cache.update.index).origin)
    return (stored[0], stored[1]) if len(stored) > 2 and stored[0] * stored[1] == slots else (1, slots)


def _replaced(cache: CacheRoles, out: Expression) -> Replacement:
    dims = (cache.slot, cache.batch, cache.width)
    rows = Call(aten.reshape.default, out, [product(axis.size for axis in dim) for dim in dims])
    return replacing(cache.update.node, cache.update.index, result(rows, dims))
