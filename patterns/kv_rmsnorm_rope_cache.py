"""The key side alone: the norm of the latent, the rotation of the key and both cache writes as one operator.

    ckv_cache[index] = rms_norm(kv[:Hckv]) gamma,  k_cache[index] = rope(kv[Hckv:])

Applies where the prolog does not: a prefill that stays expanded, a number of query tokens known at run time only, or a
query that is made in some other way. Rows that are appended to a cache are written into a new one, of their own number.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HCKV, Appended, Case, NoRotaryPart, WeightedQuery
from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match
from mla_fx.matching.pattern import CallPattern, NearestMiss, Operand, either, rms_norm, rope, stored, var
from mla_fx.readings.cache_update import WRITES, CacheUpdate, cache_update
from mla_fx.readings.calls import named_argument
from mla_fx.readings.element import Element, element_of
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope
from mla_fx.readings.views import shape_of
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.materialize import Axes, axes, result, tensor
from mla_fx.rewriting.operands import (
    CacheRoles,
    Joined,
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    emit_caches,
    emit_new_cache,
    emit_tables,
    joined,
    last_dimension,
    normed,
    replace_cache,
    replace_rows,
)
from mla_fx.rewriting.replacement import ATTENTION, Replacement
from mla_fx.rule import Rule

aten = torch.ops.aten
ONE_EACH = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}

K_ROPE = either("k_rope", normed=normed("k_rope", "kv_rmsnorm_rope_cache"), plain=var("k_rope"))
# b and t: batch and context of the caches, c latent and r rotary columns
KV_CACHE = Operand("btc", stored(rms_norm(var("latent"), var("gamma"), name="norm"), name="kv_cache.write"))
PATTERN = CallPattern(
    {
        "kv_cache": KV_CACHE,
        "kr_cache": Operand(
            "btr",
            stored(
                either(
                    "rotation",
                    rotated=rope(K_ROPE, name="rope", along=last_dimension("kr_cache")),
                    none=K_ROPE,
                ),
                name="kr_cache.write",
                beside="kv_cache.write",
            ),
        ),
    }
)
WITHOUT_ROTARY_PART = CallPattern({"kv_cache": KV_CACHE})


@dataclass(frozen=True)
class Facts:
    """`along` are the columns of the rotary key before its rotation, if there is one; `kv` are both parts, where they
    are neighbours."""

    match: Match
    kv: Joined | None
    along: Axes
    latent: CacheRoles
    keys: CacheRoles | None
    norm: RmsNorm
    rotation: Rope | None


class _TwoProjections(WeightedQuery):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = x @ self.kv_a[:HCKV].T, (x + 1) @ self.kv_a[HCKV:].T
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class _TwoPositions(WeightedQuery):
    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.kv_cache.index_copy_(2, position, latent)
        self.kr_cache.index_copy_(2, position - 1, k_rope)
        return self.kv_cache, self.kr_cache


class _Appended(WeightedQuery, Appended):
    """A cache that grows by cat."""


class _NoRotaryPart(WeightedQuery, NoRotaryPart):
    """Keys have no rotary part."""


class _NoRotaryPartAppended(_NoRotaryPart, Appended):
    """The same with a cache that grows by cat."""


class KvRmsnormRopeCache(Rule[Facts]):
    stage = "cache"
    targets = ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (
        Case("query made elsewhere", WeightedQuery, ONE_EACH),
        Case("latent and key projected apart", _TwoProjections, ONE_EACH),
        Case("rows appended", _Appended, ONE_EACH),
        Case("no rotary part", _NoRotaryPart, ONE_EACH),
        Case("no rotary part, rows appended", _NoRotaryPartAppended, ONE_EACH),
    )
    rejects = (Case("two positions", _TwoPositions, because="written to different positions"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if _is_cached(element_of(named_argument(node, "kv_cache"))))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        has_rotary_part = named_argument(anchor, "kr_cache") is not None
        return (PATTERN if has_rotary_part else WITHOUT_ROTARY_PART).at(anchor, nearest)

    def check(self, match: Match) -> Facts:
        """Latent and rotary key go to the same positions of two caches."""
        names = [name for name in PATTERN.operands if f"{name}.axes" in match.readings]
        updates = [update for name in names if (update := match.get(CacheUpdate, f"{name}.write")) is not None]
        if len(updates) < len(names):
            raise NoMatch("latent and rotary key are not both cached", match["latent"].origin)
        latent, *others = map(cache_roles, updates)
        norm, rotation = match.reading(RmsNorm, "norm"), match.get(Rope, "rope")
        check_norm_of_rows(norm, latent.width)
        if not others:
            return Facts(match, None, (), latent, None, norm, None)
        (keys,) = others
        check_same_write(latent, keys)
        along = keys.width if rotation is None else axes(rotation.along, "the rotary key", rotation.node)
        kv = joined(match["latent"], latent.width, match["k_rope"], along)
        return Facts(match, kv, along, latent, keys, norm, rotation)

    def rewrite(self, emit: Emitter, facts: Facts) -> Iterator[Replacement]:
        latent, keys, rotation = facts.latent, facts.keys, facts.rotation
        kv = _rows(emit, facts, latent.update.rows.meta["val"].dtype)
        gamma = tensor(emit, facts.match["gamma"], (latent.width,))
        options: dict[str, object] = {"epsilon": facts.norm.epsilon, "gamma_after_cast": facts.norm.gamma_after_cast}
        if facts.norm.factor != 1.0:
            options["kc_scale"] = facts.norm.factor
        cos, sin = emit_tables(emit, rotation, ("cos", "sin"), (latent.batch, (), latent.token))
        if rotation is not None:
            options["rope_layout"] = rotation.layout
        if latent.update.position is None:
            index, replace = None, _replace_rows
            ckv_cache, k_cache = (_new_cache(emit, cache, kv) for cache in (latent, keys))
            options["cache_mode"] = "BNSD"
        else:
            index, ckv_cache, k_cache = emit_caches(emit, latent, keys)
            replace = replace_cache
        target = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default
        out = emit.call(target, kv, gamma, cos, sin, index, k_cache, ckv_cache, **options)
        if keys is not None:
            yield replace(emit, keys, emit.call(operator.getitem, out, 0))
        yield replace(emit, latent, emit.call(operator.getitem, out, 1))


def _is_cached(latents: Element) -> bool:
    """Rows enter a cache, and no operator has made them already."""
    try:
        return cache_update(latents).row.origin.target is not operator.getitem
    except NoMatch:
        return latents.origin.target in WRITES  # in a way that is to be told


def _new_cache(emit: Emitter, cache: CacheRoles | None, kv: Node) -> Node:
    """[B,1,S,width]; without a rotary part that of its keys has no columns."""
    lead = shape_of(kv)[:-1]
    if cache is None:
        return emit_new_cache(emit, kv, *lead, 0)
    return emit_new_cache(emit, cache.update.rows, *lead, shape_of(cache.update.rows)[-1])


def _replace_rows(emit: Emitter, cache: CacheRoles, out: Node) -> Replacement:
    return replace_rows(emit, cache, result(out, (cache.batch, (), cache.token, cache.width)))


def _rows(emit: Emitter, facts: Facts, dtype: torch.dtype) -> Node:
    """Latents and rotary keys side by side, [B,1,S,Hckv+Dr]: as they are, or joined if they were made apart."""
    tokens = (facts.latent.batch, (), facts.latent.token)
    if facts.kv is not None:
        return tensor(emit, facts.kv.element, (*tokens, (facts.kv.axis,)), dtype=dtype)
    parts = [("latent", facts.latent.width), *([] if facts.keys is None else [("k_rope", facts.along)])]
    rows = [tensor(emit, facts.match[name], (*tokens, width), dtype=dtype, expand=True) for name, width in parts]
    return rows[0] if len(rows) == 1 else emit.call(aten.cat.default, rows, -1)
