"""The key side alone: the norm of the latent, the rotation of the key and both cache writes as one operator.

    ckv_cache[index] = rms_norm(kv[:Hckv]) gamma,  k_cache[index] = rope(kv[Hckv:])

Applies where the prolog does not: a prefill that stays expanded, a number of query tokens known only at run time, or a
query that is computed differently. Rows that are appended to a cache are written into a new one that holds just
them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import HCKV
from mla_fx.readings.cache_update import WRITES, cache_update
from mla_fx.readings.calls import named_argument
from mla_fx.readings.quantised_cache import cache_behind
from mla_fx.readings.sizes import product
from mla_fx.rewriting.operands import (
    CacheRoles,
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    joined,
    last_dimension,
    new_cache,
    normed,
    positions_and_caches,
    replaced_cache,
    replaced_rows,
    tables,
)
from mla_fx.rule import (
    ATTENTION,
    Appended,
    CacheUpdate,
    Call,
    CallPattern,
    Case,
    Element,
    Expression,
    Match,
    NearestMiss,
    NoMatch,
    NoRotaryPart,
    Operand,
    Plan,
    Replaced,
    RmsNorm,
    Rope,
    Rule,
    WeightedQuery,
    axes,
    behind,
    either,
    element_of,
    result,
    rms_norm,
    rope,
    shape_of,
    stored,
    tensor,
    var,
)

aten = torch.ops.aten
ONE_EACH = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}

K_ROPE = either("k_rope", normed=normed("k_rope", "kv_rmsnorm_rope_cache"), plain=var("k_rope"))
# b and t: batch and context of the caches, c latent and r rotary columns
WRITTEN = stored(rms_norm(var("latent"), var("gamma"), name="norm"), name="kv_cache.write")
KV_CACHE = Operand("btc", either("kv_cache.read", plain=WRITTEN, quantised=behind(WRITTEN)))
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


class KvRmsnormRopeCache(Rule):
    stage = "cache"
    targets = ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (
        Case("query computed elsewhere", WeightedQuery, ONE_EACH),
        Case("latent and key projected separately", _TwoProjections, ONE_EACH),
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

    def rewrite(self, match: Match) -> Plan:
        """Latent and rotary key are written to the same positions of two caches."""
        names = [name for name in PATTERN.operands if f"{name}.axes" in match.readings]
        updates = [update for name in names if (update := match.get(CacheUpdate, f"{name}.write")) is not None]
        if len(updates) < len(names):
            raise NoMatch("latent and rotary key are not both cached", match["latent"].origin)
        latent, *others = map(cache_roles, updates)
        keys = others[0] if others else None
        norm, rotation = match.reading(RmsNorm, "norm"), match.get(Rope, "rope")
        check_norm_of_rows(norm, latent.width)
        if keys is not None:
            check_same_write(latent, keys)
        options: dict[str, object] = {"epsilon": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
        if norm.factor != 1.0:
            options["kc_scale"] = norm.factor
        if rotation is not None:
            options["rope_layout"] = rotation.layout
        if latent.update.is_appended:
            index, replaced_by = None, _replaced_rows
            ckv_cache, k_cache = _new_cache(latent, latent), _new_cache(latent, keys)
            options["cache_mode"] = "BNSD"
        else:
            index, ckv_cache, k_cache = positions_and_caches(latent, keys)
            replaced_by = replaced_cache
        kv, gamma = _rows(match, latent, keys), tensor(match["gamma"], (latent.width,))
        cos, sin = tables(rotation, ("cos", "sin"), (latent.batch, (), latent.token))
        target = torch.ops.mla_fx.kv_rmsnorm_rope_cache.default
        out = Call(target, kv, gamma, cos, sin, index, k_cache, ckv_cache, **options)
        written = ((cache, Call(operator.getitem, out, place)) for place, cache in ((0, keys), (1, latent)) if cache)
        return Plan(*(replaced_by(cache, new) for cache, new in written))


def _is_cached(latents: Element) -> bool:
    """Rows enter a cache, and no operator has computed them already."""
    written = cache_behind(latents.origin)
    latents = latents if written is None or latents.origin.target in WRITES else element_of(written)
    try:
        return cache_update(latents).row.origin.target is not operator.getitem
    except NoMatch:
        return latents.origin.target in WRITES  # with a reason worth reporting


def _new_cache(latent: CacheRoles, cache: CacheRoles | None) -> Expression:
    """[B,1,S,width]; without a rotary part, the keys have no columns."""
    rows = latent.update.rows if cache is None else cache.update.rows
    batch, tokens = (product(axis.size for axis in role) for role in latent.row)
    return new_cache(rows, rows.meta["val"].dtype, batch, 1, tokens, 0 if cache is None else shape_of(rows)[-1])


def _replaced_rows(cache: CacheRoles, out: Expression) -> Replaced:
    return replaced_rows(cache, result(out, (cache.batch, (), cache.token, cache.width)))


def _rows(match: Match, latent: CacheRoles, keys: CacheRoles | None) -> Expression:
    """Adjacent latents and rotary keys, [B,1,S,Hckv+Dr]: one value, or joined if they were computed separately."""
    tokens, dtype = (latent.batch, (), latent.token), latent.update.rows.meta["val"].dtype
    parts = [("latent", latent.width)]
    if keys is not None:
        rotation = match.get(Rope, "rope")  # its columns are those of the rotary key before rotation
        along = keys.width if rotation is None else axes(rotation.along, "the rotary key", rotation.node)
        kv = joined(match["latent"], latent.width, match["k_rope"], along)
        if kv is not None:
            return tensor(kv.element, (*tokens, (kv.axis,)), dtype=dtype)
        parts.append(("k_rope", along))
    rows = [tensor(match[name], (*tokens, width), dtype=dtype, expand=True) for name, width in parts]
    return rows[0] if len(rows) == 1 else Call(aten.cat.default, rows, -1)
