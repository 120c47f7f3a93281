"""The prolog of DeepSeek-V3.2 on NPUs: an int8 query projection, and latents that are written as codes and scales.

    c, c_scale    = int8(rms_norm(token_x w_dq) gamma_cq)
    q             = (c w_uq_qr) c_scale dequant_scale = [q_nope, q_rope]
    query         = q_nope w_uk,                            query_rope = rope(q_rope)
    k             = token_x w_dkv_kr = [latent, k_rope]
    codes, scales = int8(rms_norm(latent) gamma_ckv)        one scale for each quarter of a latent
    kv_cache[index] = codes,   k_scale_cache[index] = scales,   kr_cache[index] = rope(k_rope)

The program's own code dequantises what attention reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from mla_fx.rule import Match, NearestMiss, NoMatch, Pattern
from mla_fx.rule.caches import (
    CacheRoles,
    CacheUpdate,
    cache_roles,
    cache_update,
    caches_behind,
    check_same_write,
    slots_by_target,
)
from mla_fx.rule.operands import Call, Expression, tensor
from mla_fx.rule.readings import (
    QUOTIENT,
    Axis,
    Element,
    QuantisedTiles,
    QuantisedTokens,
    RmsNorm,
    Scaling,
    element_of,
    is_coarser,
    named_argument,
    product,
    quantised_tiles,
    rounded_in,
)

from .dataflow import KV_LATENT, over
from .prolog import MatchedLayer, Prolog
from .scales import check_products, check_query, factors_of, query_factor, scales_of_query
from .weights import PROJECTIONS, UQ_QR

aten = torch.ops.aten
OPERATOR, LAYOUT, TILES = "mla_prolog_quant", "interleave_half", 4
CACHES = ("kv_cache", "kr_cache", "k_scale_cache")
RECIPROCALS = (aten.rsqrt.default, aten.reciprocal.default)


@dataclass(frozen=True)
class _Tiled(Pattern):
    """Latents dequantised from a cache of codes and a cache of scales, whose new rows are quantised from `row`."""

    row: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        caches = _quantised_caches(element)
        if caches is None:
            return
        codes = cache_update(element_of(caches[0]))
        scales = cache_update(element_of(caches[1])).beside(codes)
        found = quantised_tiles(codes.row, _last(codes), scales.row, _last(scales), QUOTIENT)
        match = match.read("kv_cache.write", replace(codes, row=found.value))
        match = match.read("k_scale_cache.write", scales).read("tiles", found)
        yield from self.row.bindings(found.value, match, nearest)


def _quantised_caches(latents: Element) -> tuple[Node, Node] | None:
    """The written caches of codes and of scales that latents are computed from."""
    found = caches_behind(latents.origin)
    codes = [cache for cache in found if cache.meta["val"].dtype == torch.int8]
    scales = [cache for cache in found if cache.meta["val"].is_floating_point()]
    return (codes[0], scales[0]) if len(found) == 2 and len(codes) == len(scales) == 1 else None


def _last(update: CacheUpdate) -> Axis:
    axis = update.index[-1].axis
    if axis is None:
        raise NoMatch("a cache has rows of one element", update.node)
    return axis


class Tiled(Prolog):
    pattern = over(_Tiled(KV_LATENT))

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if _is_tiled(node))

    def layer(self, match: Match) -> MatchedLayer:
        caches = _caches(match)
        _check_weights(match)
        return MatchedLayer.of(match, 1, match["token_x"].dtype, caches, is_batched=False)

    def call(self, layer: MatchedLayer) -> Call:
        match, (latent, keys, scales) = layer.match, _written(layer)
        _check_dtypes(layer)
        _check_factors(layer)
        rotation = layer.rotation(OPERATOR)
        if rotation.layout != LAYOUT:
            raise NoMatch(f"the key is rotated in layout {rotation.layout}; {OPERATOR} has {LAYOUT}", rotation.node)
        dq, uq_qr, *others = layer.weights.operands(layer.dtype)
        of_columns, smooth = scales_of_query(match, layer.weights)
        index = Call(aten.squeeze.dim, slots_by_target(latent, keys, scales), 0)
        operands = (
            *(layer.tokens(), dq, uq_qr, Call(aten.t.default, of_columns), *others),
            *layer.tables(rotation, "cos", "sin"),
            *(index, *map(_old, (latent, keys, scales)), smooth),
        )
        epsilons = {f"epsilon_{name}": match.reading(RmsNorm, name).epsilon for name in ("cq", "ckv")}
        return Call(torch.ops.mla_fx.mla_prolog_quant.default, *operands, **epsilons)

    def heads_at(self, layer: MatchedLayer, cache: CacheRoles | None = None) -> int:
        return 2

    def differences(self, layer: MatchedLayer) -> Iterator[str]:
        match, codes = layer.match, layer.match.reading(QuantisedTokens, "cq.codes")
        tiles = match.reading(QuantisedTiles, "tiles")
        smoothed = match.get(Scaling, "cq.smoothed")
        query = codes.value if smoothed is None else smoothed.value
        yield from _other_roundings("the query's latent", query, match.reading(RmsNorm, "cq"), layer.dtype)
        norm = match.reading(RmsNorm, "ckv")
        yield from _other_roundings("the latent", tiles.value, norm, layer.dtype)
        if not norm.gamma_after_cast and not _multiplies_in_order(norm):
            yield "the latent is normalised otherwise than as gamma * (value * (1 / root)), as a kernel does"


def _is_tiled(anchor: Node) -> bool:
    """Whether attention is over latents from a cache of codes and a cache of scales, with rotary keys from a third."""
    has_rotary_part = named_argument(anchor, "kr_cache") is not None
    return has_rotary_part and _quantised_caches(element_of(named_argument(anchor, "kv_cache"))) is not None


def _written(layer: MatchedLayer) -> list[CacheRoles]:
    return [cache for cache in layer.caches.values() if cache is not None]


def _old(cache: CacheRoles) -> Expression:
    """One page [1, Slots, 1, Width]."""
    return tensor(Element(cache.update.old, cache.update.index), ((), cache.slot, (), cache.width))


# --- what the operator does not do -----------------------------------------------------------------------------------


def _caches(match: Match) -> dict[str, CacheRoles]:
    """Raises NoMatch unless the three caches are written by all rows, at the same slots of one sequence."""
    updates = {name: match.get(CacheUpdate, f"{name}.write") for name in CACHES}
    found = {name: cache_roles(update) for name, update in updates.items() if update and not update.is_appended}
    if len(found) < len(CACHES):
        raise NoMatch("the rotary key is not written into a cache", match.readings["kr_cache.axes"].node)
    latent, keys, scales = (found[name] for name in CACHES)
    for cache in found.values():
        if cache.batch:
            size = product(axis.size for axis in cache.batch)
            raise NoMatch(f"a cache has a batch of {size}; {OPERATOR} writes pages without a batch", cache.update.node)
    check_same_write(latent, scales, "the codes and scales of latents")
    check_same_write(latent, keys)
    if (count := product(axis.size for axis in scales.width)) != TILES:
        raise NoMatch(f"latents have {count} scales; {OPERATOR} writes {TILES}", scales.update.node)
    return found


def _check_weights(match: Match) -> None:
    for name in PROJECTIONS:
        if name not in match.elements:
            continue
        weight, is_int8 = match[name], name in UQ_QR
        stored = weight.origin.meta["val"].dtype
        if (stored == torch.int8) != is_int8 or (weight.scales is not None) != is_int8:
            raise NoMatch(f"{OPERATOR} takes int8 weights of q_b alone; {name} is {stored}", weight.origin)


def _check_dtypes(layer: MatchedLayer) -> None:
    """Raises NoMatch unless the program multiplies and stores in the dtypes in which the operator does."""
    match, dtype, (_, keys, tiles) = layer.match, layer.dtype, _written(layer)
    check_query(match, dtype, OPERATOR)
    of_rope = match["weight_qr"].scales
    if of_rope is not None and is_coarser(dtype, of_rope.dtype):
        raise NoMatch(f"q_rope is in {of_rope.dtype}, {OPERATOR} rounds it to {dtype}", match["weight_qr"].origin)
    check_products(match, dtype, OPERATOR)
    for name, cache, wanted in (("keys", keys, dtype), ("scales", tiles, torch.float32)):
        node = cache.update.node
        if (stored := node.meta["val"].dtype) != wanted:
            raise NoMatch(f"the cache of {name} is {stored}; {OPERATOR} has {wanted}", node)


def _check_factors(layer: MatchedLayer) -> None:
    """Raises NoMatch if a number or a tensor multiplies the query or the latents."""
    norm = layer.match.reading(RmsNorm, "ckv")
    for what, factor in (("query", query_factor(layer.match)), ("latent", norm.factor)):
        if factor != 1.0:
            raise NoMatch(f"the {what} is multiplied by a number, {factor:.6g}", norm.node)
    if layer.scale is not None:
        origin = layer.scale.origin
        raise NoMatch(f"the query is multiplied by a tensor, which {OPERATOR} does not take", origin)


def _multiplies_in_order(norm: RmsNorm) -> bool:
    """Whether a norm is gamma * (value * (1 / root)). Another order has other last bits."""
    inner = [part for part in factors_of(norm.node) if part is not norm.gamma.origin]
    return len(inner) == 1 and any(part.target in RECIPROCALS for part in factors_of(inner[0]))


def _other_roundings(what: str, value: Element, norm: RmsNorm, dtype: torch.dtype) -> Iterator[str]:
    """A kernel computes a norm in float32 and rounds it once, behind gamma."""
    quantised = value.coarsest or value.dtype
    if is_coarser(dtype, quantised):
        yield f"{what} is quantised in {quantised}, a kernel rounds it to {dtype} before"
    if norm.gamma_after_cast:
        yield f"{what} is rounded before and after gamma multiplies it, in a kernel only after"
    else:
        yield from rounded_in(f"the norm of {what} is computed", norm.node, {norm.value.origin, norm.gamma.origin})
