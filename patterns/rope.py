"""A rotation that no larger operator took: that of an attention's query, or of key rows that are stored.

    out = rope(x)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import DR, Case, GrowingCache, WeightedQuery
from mla_fx.rule import Match, NoMatch, Plan, Rule, ValuePattern, last_dimension, rope, var
from mla_fx.rule.caches import cache_update
from mla_fx.rule.operands import ATTENTION, Call, tables, tensor
from mla_fx.rule.readings import Rope, axes, element_of, named_argument


class _Interleaved(WeightedQuery):
    """Read interleaved and written as halves, as in DeepSeek-V3, with tables of half the width."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[..., : DR // 2], sin[..., : DR // 2]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class _GrowingCache(WeightedQuery, GrowingCache):
    """A cache that grows by cat: its new rows are rotated, too, if no key side fuses."""

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().rows(x)
        return latent + 1, k_rope


FUSED = {"rms_norm": 1, "rope": 1, "kv_rmsnorm_rope_cache": 1, "latent_attention": 1}


class RopeAlone(Rule):
    stage = "piece"
    pattern = ValuePattern(rope(var("x"), name="rope", along=last_dimension("value")), letters="b t u r")
    tells_misses = False
    accepts = (
        Case("halves", WeightedQuery, FUSED, pieces=True),
        Case("interleaved columns written as halves", _Interleaved, FUSED, pieces=True),
        Case("rows appended", _GrowingCache, {"rms_norm": 2, "rope": 2, "latent_attention": 1}, pieces=True),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        for attention in graph.find_nodes(op="call_function", target=ATTENTION):
            query, keys = (named_argument(attention, name) for name in ("query_rope", "kr_cache"))
            if query is None:
                continue  # an attention without a rotary part
            yield query
            with contextlib.suppress(NoMatch):
                yield cache_update(element_of(keys)).rows

    def rewrite(self, match: Match) -> Plan:
        """Tables are the same for all heads; tokens are the dimension, before or after the heads, that the tables
        have."""
        rotation = match.reading(Rope, "rope")
        halves = (half for table in (rotation.cos, rotation.sin) for half in (table.first, table.second))
        along = {axis for half in halves for axis in half.axes}
        order = "b u t r" if along.intersection(match.axes("u")) else "b t u r"
        b, s, n, _ = match.dims(order)
        r = axes(rotation.along, "the rotary dimension", rotation.node)
        cos_and_sin = tables(rotation, ("cos", "sin"), (b, s))
        x = tensor(match["x"], (b, s, n, r))
        out = Call(torch.ops.mla_fx.rope.default, x, *cos_and_sin, rope_layout=rotation.layout)
        return Plan(match.replacing(out, order))
