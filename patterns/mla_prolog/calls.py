"""The calls of mla_prolog and of mla_prolog_v3, which have all but scales and modes in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_fx.rule import Match, NoMatch
from mla_fx.rule.operands import Call, Expression
from mla_fx.rule.readings import RmsNorm, Rope, check_codes

from .factors import factor_of_keys, query_factor, with_divided_tables
from .prolog import MatchedLayer
from .scales import V3, check_query, scales_of
from .weights import query_norm


@dataclass(frozen=True)
class CacheOperands:
    """Positions [B or 1,S], and both caches before the write."""

    index: Expression | None
    kv_cache: Expression
    kr_cache: Expression
    mode: str = "Norm"


def call(layer: MatchedLayer, caches: CacheOperands, **modes: object) -> Call:
    """Raises NoMatch unless the operator multiplies and rounds as the program does."""
    match, mode, dtype = layer.match, layer.mode, layer.dtype
    x, rotation, of_keys = match["token_x"], match.get(Rope, "kr_cache.rope"), factor_of_keys(match, mode)
    if mode:
        check_query(match, dtype, V3)
    if mode == 2:
        check_codes(x)
    elif x.dtype != dtype:
        raise NoMatch(f"token_x is {x.dtype}, the cache {dtype}", x.origin)
    if mode:
        rotation = with_divided_tables(layer.rotation(V3), of_keys)
    shared = (
        layer.tokens(),
        *layer.weights.operands(dtype),
        *layer.tables(rotation, "sin", "cos", expand=bool(mode) or not layer.rows[0]),
    )
    options = {**_options(match, of_keys), **modes, "cache_mode": caches.mode}
    if not mode:
        target = torch.ops.mla_fx.mla_prolog.default
        return Call(target, *shared, caches.index, caches.kv_cache, caches.kr_cache, **options)
    scales = scales_of(match, layer.weights, mode, (*layer.rows[0], *layer.rows[1]), of_keys)
    operands = (*shared, caches.kv_cache, caches.kr_cache, caches.index, *scales)
    return Call(torch.ops.mla_fx.mla_prolog_v3.default, *operands, **options, weight_quant_mode=mode)


def _options(match: Match, of_keys: float) -> dict[str, object]:
    """The numbers and forms of a call in which `of_keys` multiplies k_rope, and the latent, whose norm has no scale but
    that of its epsilon."""
    norm, rotation, of_query = match.reading(RmsNorm, "ckv"), match.get(Rope, "kr_cache.rope"), query_norm(match)
    found: dict[str, object] = {
        "rmsnorm_epsilon_ckv": norm.epsilon * of_keys**2,
        "gamma_after_cast": norm.gamma_after_cast,
    }
    scales = {"qc_qr_scale": query_factor(match, of_keys), "kc_scale": norm.factor}
    found |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if of_query is not None:
        found["rmsnorm_epsilon_cq"] = of_query.epsilon
    if rotation is not None:
        found["rope_layout"] = rotation.layout
    return found
