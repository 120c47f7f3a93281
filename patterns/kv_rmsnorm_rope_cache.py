"""The key side alone: the norm of the latent, the rotation of the key and both cache writes as one operator.

    ckv_cache[index] = rms_norm(kv[:Hckv]) gamma,  k_cache[index] = rope(kv[Hckv:])

Applies where the prolog does not: a prefill that stays expanded, a number of query tokens known at run time only, or a
query that is made in some other way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.binding import Match
from mla_fx.cases import HCKV, Case, ScaledQuery
from mla_fx.emitter import Emitter
from mla_fx.errors import NoMatch
from mla_fx.layout import Axes, axes, tensor
from mla_fx.match import CallPattern, Operand, either, rms_norm, rope, stored, var
from mla_fx.operands import (
    CacheRoles,
    Joined,
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    emit_cache,
    emit_positions,
    emit_table,
    joined,
    last_dimension,
    only,
    replace_cache,
)
from mla_fx.readings.cache_update import WRITES, CacheUpdate
from mla_fx.readings.element import element_of
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope
from mla_fx.readings.views import named_argument
from mla_fx.replacement import Replacement
from mla_fx.rule import Rule

aten = torch.ops.aten
ONE_EACH = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
ATTENTION = (torch.ops.mla_fx.mla_attention.default, torch.ops.mla_fx.latent_attention.default)

# b and t: batch and context of the caches, c latent and r rotary columns
PATTERN = CallPattern(
    {
        "kv_cache": Operand("btc", stored(rms_norm(var("latent"), var("gamma"), name="norm"), name="kv_cache.write")),
        "kr_cache": Operand(
            "btr",
            stored(
                either(
                    "rotation",
                    rotated=rope(var("k_rope"), name="rope", along=last_dimension("kr_cache")),
                    none=var("k_rope"),
                ),
                name="kr_cache.write",
                beside="kv_cache.write",
            ),
        ),
    }
)


@dataclass(frozen=True)
class Facts:
    """`along` are the columns of the rotary key before its rotation; `kv` are both parts, where they are neighbours."""

    match: Match
    kv: Joined | None
    along: Axes
    latent: CacheRoles
    keys: CacheRoles
    norm: RmsNorm
    rotation: Rope | None


class _TwoProjections(ScaledQuery):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = x @ self.kv_a[:HCKV].T, (x + 1) @ self.kv_a[HCKV:].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class _TwoPositions(ScaledQuery):
    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.kv_cache.index_copy_(2, position, latent)
        self.kr_cache.index_copy_(2, position - 1, k_rope)
        return self.kv_cache, self.kr_cache


class KvRmsnormRopeCache(Rule[Facts]):
    stage = "cache"
    targets = ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (
        Case("query made elsewhere", ScaledQuery, ONE_EACH),
        Case("latent and key projected apart", _TwoProjections, ONE_EACH),
    )
    rejects = (Case("two positions", _TwoPositions, because="written to different positions"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        attention = super().anchors(graph)
        return (node for node in attention if element_of(named_argument(node, "kv_cache")).origin.target in WRITES)

    def check(self, match: Match) -> Facts:
        """Latent and rotary key go to the same positions of two caches."""
        updates = [match.get(CacheUpdate, f"{cache}.write") for cache in PATTERN.operands]
        if any(update is None or update.position is None for update in updates):
            raise NoMatch("no cache is written in place", match["latent"].origin)
        latent, keys = (cache_roles(update) for update in updates if update is not None)
        check_same_write(latent, keys)
        norm, rotation = match.reading(RmsNorm, "norm"), match.get(Rope, "rope")
        check_norm_of_rows(norm, latent.width)
        along = keys.width if rotation is None else axes(rotation.along, "the rotary key", rotation.node)
        k_rope = match["k_rope"]
        columns = only(latent.width, "the latent", norm.node), only(along, "the rotary key", k_rope.origin)
        kv = joined(match["latent"], columns[0], k_rope, columns[1])
        return Facts(match, kv, along, latent, keys, norm, rotation)

    def rewrite(self, emit: Emitter, facts: Facts) -> Iterator[Replacement]:
        latent, keys, rotation = facts.latent, facts.keys, facts.rotation
        k_cache, ckv_cache = emit_cache(emit, keys), emit_cache(emit, latent)
        dtype = ckv_cache.meta["val"].dtype
        kv = _rows(emit, facts, dtype)
        gamma = tensor(emit, facts.match["gamma"], (latent.width,))
        options: dict[str, object] = {"epsilon": facts.norm.epsilon, "gamma_after_cast": facts.norm.gamma_after_cast}
        cos = sin = None
        if rotation is not None:
            outer = (keys.batch, (), keys.token)
            cos, sin = (emit_table(emit, table, rotation.pair, outer) for table in (rotation.cos, rotation.sin))
            options["rope_layout"] = rotation.layout
        target, index = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default, emit_positions(emit, latent, keys)
        out = emit.call(target, kv, gamma, cos, sin, index, k_cache, ckv_cache, **options)
        yield replace_cache(emit, keys, emit.call(operator.getitem, out, 0))
        yield replace_cache(emit, latent, emit.call(operator.getitem, out, 1))


def _rows(emit: Emitter, facts: Facts, dtype: torch.dtype) -> Node:
    """Latents and rotary keys side by side, [B,1,S,Hckv+Dr]: as they are, or joined if they were made apart."""
    tokens = (facts.latent.batch, (), facts.latent.token)
    if facts.kv is not None:
        return tensor(emit, facts.kv.element, (*tokens, (facts.kv.axis,)), dtype=dtype)
    parts = (facts.match["latent"], facts.latent.width), (facts.match["k_rope"], facts.along)
    return emit.call(
        aten.cat.default, [tensor(emit, part, (*tokens, width), dtype=dtype, expand=True) for part, width in parts], -1
    )
