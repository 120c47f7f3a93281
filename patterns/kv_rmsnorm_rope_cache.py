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

from mla_fx.canonical.cache_update import WRITES
from mla_fx.canonical.element import element_of
from mla_fx.cases import HCKV, Case, Layer, S
from mla_fx.errors import NoMatch
from mla_fx.match import CallPattern, Match, Trail, either, rms_norm, rope, stored, var
from mla_fx.operands import (
    CacheRoles,
    Joined,
    cache_roles,
    check_same_write,
    emit_cache,
    emit_positions,
    emit_table,
    joined,
    last_dimension,
    only,
    rename,
    replace_cache,
)
from mla_fx.rewrite import Emitter
from mla_fx.rule import Rule

ATTENTION = (torch.ops.mla_fx.mla_attention.default, torch.ops.mla_fx.latent_attention.default)

PATTERN = CallPattern(
    {
        "kv_cache": stored(rms_norm(var("latent"), var("gamma"), name="norm"), name="kv_cache.write"),
        "kr_cache": stored(
            either(
                "rotation",
                rotated=rope(var("k_rope"), name="rope", along=last_dimension("kr_cache")),
                none=var("k_rope"),
            ),
            name="kr_cache.write",
        ),
    }
)


@dataclass(frozen=True)
class Facts:
    match: Match
    kv: Joined
    latent: CacheRoles
    keys: CacheRoles


class _QueryElsewhere(Layer):
    """The query is scaled by position after its projection, as Mistral 4 does; the key side is as ever."""

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * torch.arange(1.0, S + 1).view(1, S, 1)


class _TwoProjections(_QueryElsewhere):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = x @ self.kv_a[:HCKV].T, (x + 1) @ self.kv_a[HCKV:].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class _TwoPositions(_QueryElsewhere):
    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.kv_cache.index_copy_(2, position, latent)
        self.kr_cache.index_copy_(2, position - 1, k_rope)
        return self.kv_cache, self.kr_cache


class KvRmsnormRopeCache(Rule[Facts]):
    stage = "cache"
    accepts = (Case("query made elsewhere", _QueryElsewhere, {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}),)
    rejects = (
        Case("latent and key projected apart", _TwoProjections, because="not neighbours in one tensor"),
        Case("two positions", _TwoPositions, because="written to different positions"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        attention = (node for target in ATTENTION for node in graph.find_nodes(op="call_function", target=target))
        return (node for node in attention if element_of(node.args[2]).node.target in WRITES)

    def bindings(self, anchor: Node, trail: Trail) -> Iterator[Match]:
        yield from PATTERN.bindings(anchor, {"kv_cache": anchor.args[2], "kr_cache": anchor.args[3]}, trail)

    def check(self, match: Match) -> Facts:
        """Latent and rotary key are neighbours in one tensor and go to the same positions of two caches."""
        updates = match.readings["kv_cache.write"], match.readings["kr_cache.write"]
        if any(match.choices[name] != "write" for name in ("kv_cache.write", "kr_cache.write")):
            raise NoMatch("no cache is written in place", match["latent"].node)
        latent, keys = (cache_roles(update) for update in updates)
        check_same_write(latent, keys)
        rotation = match.readings.get("rope")
        rope_axis = rotation.axis if rotation else only(keys.width, "the rotary key", match["k_rope"].node)
        kv = joined(
            match["latent"],
            only(latent.width, "the latent", match["latent"].node),
            match["k_rope"],
            rope_axis,
            rename((keys.batch, keys.token), (latent.batch, latent.token)),
        )
        if kv is None:
            raise NoMatch("latent and rotary key are not neighbours in one tensor", match["k_rope"].node)
        return Facts(match, kv, latent, keys)

    def rewrite(self, emit: Emitter, facts: Facts) -> None:
        match, latent, keys = facts.match, facts.latent, facts.keys
        norm, rotation = match.readings["norm"], match.readings.get("rope")
        k_cache, ckv_cache = emit_cache(emit, keys), emit_cache(emit, latent)
        dtype = ckv_cache.meta["val"].dtype
        kv = emit.tensor(facts.kv.element, (latent.batch, (), latent.token, (facts.kv.axis,)), dtype=dtype)
        gamma = emit.tensor(match["gamma"], (latent.width,))
        cos = sin = None
        if rotation is not None:
            cos, sin = (
                emit_table(emit, table, rotation.pair, (keys.batch, (), keys.token))
                for table in (rotation.cos, rotation.sin)
            )
        options = {"epsilon": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
        if rotation is not None:
            options["rope_layout"] = rotation.layout
        target = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default
        out = emit.call(target, kv, gamma, cos, sin, emit_positions(emit, latent), k_cache, ckv_cache, **options)
        replace_cache(emit, keys, emit.call(operator.getitem, out, 0))
        replace_cache(emit, latent, emit.call(operator.getitem, out, 1))
