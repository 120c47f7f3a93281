"""The prolog of a layer whose cache has packed rows: int8 latents, the bytes of a rotary key and those of scales.

    k             = token_x weight_dkv_kr = [latent, k_rope]
    codes, scales = int8(rms_norm(latent) gamma_ckv)        one scale for each 128 latents
    cache[index]  = bytes(codes), bytes(rope(k_rope)), bytes(scales)

It becomes one mla_prolog_v3 beside int8 weights. The program's own code dequantises what attention reads. A rotary key
in 16 bits is a value as in any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from mla_fx.rule import Match, NearestMiss, NoMatch, Operand, Pattern
from mla_fx.rule.caches import (
    CacheRoles,
    CacheUpdate,
    cache_roles,
    cache_update,
    caches_behind,
    new_cache,
    old_cache,
    packed_cache,
    packed_rows,
    replacing_cache,
    slots_by_target,
)
from mla_fx.rule.operands import Call, Expression, Replacement, tensor
from mla_fx.rule.readings import (
    PRODUCT,
    Element,
    OperandAxes,
    QuantisedTiles,
    RmsNorm,
    args_of,
    element_of,
    is_coarser,
    named_argument,
    of_axis,
    quantised_tiles,
    rounded_in,
    shape_of,
)

from .dataflow import KR_ROW, KV_LATENT, over
from .prolog import QUERIES, CacheOperands, MatchedLayer, Prolog, call
from .scales import V3, check_products, factors_of, weight_mode

aten = torch.ops.aten
TILE = 128
MODES = {"kv_cache_quant_mode": 3, "ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1, "tile_size": TILE}


@dataclass(frozen=True)
class _Packed(Pattern):
    """Latents dequantised from packed rows, whose new latents are quantised from `latent`. Both parts of a row are kept
    as updates of some columns."""

    latent: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        latents = match.reading(OperandAxes, "kv_cache.axes").node
        caches = caches_behind(latents)
        if len(caches) != 1:
            raise NoMatch("latents are not read from the cache that rotary keys are read from", latents)
        update = cache_update(element_of(caches[0]))
        byte = update.index[-1].axis
        if update.is_appended or byte is None:
            raise NoMatch("packed rows are appended, expected a cache into which they are written", update.node)
        stored = update.node.meta["val"].dtype
        if stored != torch.int8:
            raise NoMatch(f"packed rows are in {stored}; {V3} writes torch.int8", update.node)
        rows = packed_rows(update.row, byte, shape_of(latents)[-1])
        tiles = quantised_tiles(rows.codes, rows.column, rows.scales, rows.tile, PRODUCT)
        parts = {"kv_cache": (rows.column, tiles.value), "kr_cache": (rows.key, rows.keys)}
        match = match.read("row.write", update).read("tiles", tiles)
        for name, (axis, row) in parts.items():
            match = match.read(f"{name}.write", replace(update, index=(*update.index[:-1], of_axis(axis)), row=row))
        yield from self.latent.bindings(tiles.value, match, nearest)


@dataclass(frozen=True)
class _Key(Pattern):
    """Rotary keys read from packed rows, whose new keys satisfy `key`."""

    key: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        yield from self.key.bindings(match.reading(CacheUpdate, "kr_cache.write").row, match, nearest)


class Packed(Prolog):
    pattern = over(_Packed(KV_LATENT), Operand("atl", _Key(KR_ROW)))

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if _is_packed(node))

    def layer(self, match: Match) -> MatchedLayer:
        if not (mode := weight_mode(match)):
            source = match["token_x"].origin
            raise NoMatch(f"no projection is int8; {V3} packs rows beside int8 weights alone", source)
        latent, keys = (cache_roles(match.reading(CacheUpdate, f"{name}.write")) for name in ("kv_cache", "kr_cache"))
        return MatchedLayer.of(match, mode, keys.update.row.dtype, {"kv_cache": latent, "kr_cache": keys})

    def call(self, layer: MatchedLayer) -> Call:
        tiles, factor = layer.match.reading(QuantisedTiles, "tiles"), layer.match.reading(RmsNorm, "ckv").factor
        if tiles.width != TILE:
            raise NoMatch(f"rows have one scale for {tiles.width} latents; {V3} writes one for {TILE}", tiles.node)
        if factor != 1.0:
            raise NoMatch(f"the latent is multiplied by a number, {factor:.6g}, before it is quantised", tiles.node)
        if layer.mode == 1:
            check_products(layer.match, layer.dtype, V3)
        row = _row(layer)
        caches = CacheOperands(slots_by_target(row), old_cache(row), new_cache(row.update.old, layer.dtype, 0))
        return call(layer, caches, **MODES, k_nope_clip_alpha=_alpha(tiles))

    def replacing(self, layer: MatchedLayer, name: str, new: Expression) -> Iterator[Replacement]:
        """The latent's cache has whole rows; there is none of rotary keys."""
        if name in QUERIES:
            yield from super().replacing(layer, name, new)
        elif name == "kv_cache":
            yield replacing_cache(_row(layer), new)

    def differences(self, layer: MatchedLayer) -> Iterator[str]:
        """Where the program's latents may differ in the last bit from the operator's, which rounds none of them."""
        match = layer.match
        norm, latent = match.reading(RmsNorm, "ckv"), match.reading(QuantisedTiles, "tiles").value
        coarsest = latent.coarsest or latent.dtype
        if is_coarser(coarsest, torch.float32):
            yield f"the latent is rounded to {coarsest} before it is quantised, in a kernel it is not"
        elif not _divides_in_order(norm):
            yield "the latent is normalised otherwise than as value / root * gamma, as a kernel does"
        if layer.mode == 2 and not _is_dequantised_in_order(match):
            yield "the latent is dequantised otherwise than as integers * token scale * column scale in torch.float32"


def _is_packed(anchor: Node) -> bool:
    latents, keys = (named_argument(anchor, name) for name in ("kv_cache", "kr_cache"))
    return keys is not None and packed_cache(latents, keys) is not None


def _row(layer: MatchedLayer) -> CacheRoles:
    return cache_roles(layer.match.reading(CacheUpdate, "row.write"))


def _alpha(tiles: QuantisedTiles) -> Expression:
    """The part of its largest value to which each tile is clipped, [1] in float32."""
    number, factor = tiles.number, tiles.factor
    if number <= 0 or (factor is not None and number != 1.0):
        raise NoMatch(f"the part to which tiles are clipped is multiplied by {number:.6g}", tiles.node)
    if factor is not None:
        return tensor(factor, ((),), dtype=torch.float32)
    device = tiles.node.meta["val"].device
    return Call(aten.full.default, [1], number, dtype=torch.float32, device=device, pin_memory=False)


def _divides_in_order(norm: RmsNorm) -> bool:
    """Whether a norm is value / root * gamma in float32. Another order has other last bits."""
    inner = [part for part in factors_of(norm.node) if part is not norm.gamma.origin]
    stops = {norm.value.origin, norm.value.seen[0], norm.gamma.origin}
    is_wide = not any(rounded_in("", norm.node, stops))
    if not is_wide or len(inner) != 1 or inner[0].target is not aten.div.Tensor:
        return False
    return getattr(args_of(inner[0])[1], "target", None) is aten.sqrt.default


def _is_dequantised_in_order(match: Match) -> bool:
    value, column = match.reading(RmsNorm, "ckv").value, match["weight_dkv"].scales
    token = match["token_x"].scales
    assert token is not None and column is not None, "both are codes in mode 2"
    inner = [part for part in factors_of(value.origin) if part is not column.by[0].origin]
    is_wide = value.origin.meta["val"].dtype == torch.float32 and not value.roundings
    return is_wide and len(inner) == 1 and token.by[0].origin in factors_of(inner[0])
