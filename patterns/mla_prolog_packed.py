"""The prolog of a layer whose cache has packed rows: int8 latents, the bytes of a rotary key and those of scales.

    k             = token_x weight_dkv_kr = [latent, k_rope]
    codes, scales = int8(rms_norm(latent) gamma_ckv)        one scale for each 128 latents
    cache[index]  = bytes(codes), bytes(rope(k_rope)), bytes(scales)

It becomes one mla_prolog_v3, beside int8 weights as in patterns/mla_prolog/int8.py. The program's own code dequantises
what attention reads. Codes and scales are visible, so a program that computes them otherwise than the operator is
refused, unless it asks for the vendor's. A rotary key in 16 bits is a value as in any cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from mla_fx.cases import DR, DV, HE, Case, D, Layer, N, T
from mla_fx.rule import CallPattern, Match, NearestMiss, NoMatch, Operand, Pattern, Plan, Rule
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
    positions,
)
from mla_fx.rule.codes import PRODUCT, QuantisedTiles, QuantisedTokens, quantised_tiles, rounded_in
from mla_fx.rule.indices import of_axis
from mla_fx.rule.operands import LATENT_ATTENTION, ByTarget, Call, Expression, tensor
from mla_fx.rule.readings import (
    Element,
    OperandAxes,
    RmsNorm,
    args_of,
    element_of,
    is_coarser,
    named_argument,
    shape_of,
)

from .mla_prolog import int8
from .mla_prolog.calls import numbered, replaced, row_axes
from .mla_prolog.dataflow import KR_ROW, KV_LATENT, QUERY, QUERY_ROPE
from .mla_prolog.factors import query_scale
from .mla_prolog.weights import weights

aten = torch.ops.aten
ONE_EACH = {"mla_prolog_v3": 1, "latent_attention": 1}
OPERATOR, TILE = "mla_prolog_v3", 128
RESULTS = {"query": 0, "query_rope": 1, "kv_cache": 5}
MODES = {"kv_cache_quant_mode": 3, "ckvkr_repo_mode": 1, "quant_scale_repo_mode": 1, "tile_size": TILE}


# --- the pattern -----------------------------------------------------------------------------------------------------


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
            raise NoMatch(f"packed rows are in {stored}; {OPERATOR} writes torch.int8", update.node)
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


PATTERN = CallPattern(
    {
        "kv_cache": Operand("atk", _Packed(KV_LATENT)),
        "query": QUERY,
        "query_rope": QUERY_ROPE,
        "kr_cache": Operand("atl", _Key(KR_ROW)),
    },
    fixed="bsn",
)


# --- cases -----------------------------------------------------------------------------------------------------------


class _PackedRows(Layer):
    """One sequence in bfloat16, with a cache of slots."""

    rank, tile = 2 * TILE, TILE

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def dense(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5)

        self.kv_a, self.kv_b = dense(self.rank + DR, HE), dense(N * (D + DV), self.rank)
        self.kv_gamma = nn.Parameter(1 + 0.3 * torch.randn(self.rank, generator=generator))
        scales = self.q_b.data.abs().amax(1) / 127
        codes = (self.q_b.data / scales.unsqueeze(1)).round().to(torch.int8)
        del self.q_b, self.kv_cache, self.kr_cache
        self.to(torch.bfloat16)
        self.q_b_codes: Tensor
        self.q_b_scales: Tensor
        self.packed_cache: Tensor
        self.register_buffer("q_b_codes", codes)
        self.register_buffer("q_b_scales", scales)
        keys = torch.randn(T, DR, generator=generator).bfloat16()
        self.register_buffer("packed_cache", self.packed(torch.randn(T, self.rank, generator=generator), keys))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        tokens, cos, sin = x[0].bfloat16(), cos.bfloat16(), sin.bfloat16()
        query = self.query(tokens).view(-1, N, D + DR)
        latent, k_rope = torch.split(nn.functional.linear(tokens, self.kv_a), [self.rank, DR], dim=-1)
        q_rope = self.rotate(query[..., D:], cos.unsqueeze(1), sin.unsqueeze(1))
        rows = self.packed(self.norm(latent, self.kv_gamma), self.rotate(k_rope, cos, sin))
        self.packed_cache.index_copy_(0, position, rows)
        latents, keys = self.unpacked()
        expanded = (latents @ self.kv_b.T).view(T, N, D + DV)
        key = torch.cat((expanded[..., :D], keys.unsqueeze(1).expand(-1, N, -1)), dim=-1)
        scores = torch.einsum("snd,tnd->nst", torch.cat((query[..., :D], q_rope), dim=-1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(T) > position[:, None], -torch.inf)
        out = torch.einsum("nst,tnv->snv", scores.softmax(-1), expanded[..., D:]).flatten(1)
        return nn.functional.linear(out, self.o)

    def query(self, x: Tensor) -> Tensor:
        latent = self.norm(x @ self.q_a.T, self.q_gamma)
        scales = latent.abs().amax(-1, keepdim=True) / 127
        product = (latent / scales).round().to(torch.int8).int() @ self.q_b_codes.int().T
        return (product.float() * scales * self.q_b_scales).to(x.dtype)

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x.float(), cos.float(), sin.float()).to(x.dtype)

    def packed(self, latent: Tensor, keys: Tensor) -> Tensor:
        tiles = latent.view(len(latent), -1, self.tile)
        scales = self.scales(tiles)
        codes = (tiles * scales.reciprocal()).round().to(torch.int8).flatten(-2)
        return self.joined(codes, keys.view(torch.int8), scales.squeeze(-1).view(torch.int8))

    def scales(self, tiles: Tensor) -> Tensor:
        return tiles.abs().amax(-1, keepdim=True) * (1 / 127)

    def joined(self, codes: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
        return torch.cat((codes, keys, scales), -1)

    def split(self) -> tuple[Tensor, ...]:
        return torch.split(self.packed_cache, [self.rank, 2 * DR, 4 * self.rank // self.tile], dim=-1)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        codes, keys, scales = self.split()
        values = codes.view(T, -1, self.tile).float() * scales.view(torch.float32).unsqueeze(-1)
        return values.flatten(-2).bfloat16(), keys.view(torch.bfloat16)


class _ScalesFirst(_PackedRows):
    """FlashMLA's order."""

    def joined(self, codes: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
        return torch.cat((codes, scales, keys), -1)

    def split(self) -> tuple[Tensor, ...]:
        parts = [self.rank, 4 * self.rank // self.tile, 2 * DR]
        codes, scales, keys = torch.split(self.packed_cache, parts, dim=-1)
        return codes, keys, scales


class _NarrowTiles(_PackedRows):
    tile = TILE // 2


class _Divided(_PackedRows):
    def scales(self, tiles: Tensor) -> Tensor:
        return tiles.abs().amax(-1, keepdim=True) / 127


# --- the rule --------------------------------------------------------------------------------------------------------


class MlaPrologPacked(Rule):
    stage = "prolog"
    targets = LATENT_ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (Case("packed rows", _PackedRows, ONE_EACH),)
    rejects = (
        Case("scales before keys", _ScalesFirst, because="rows hold torch.float32, expected a rotary key in 16 bits"),
        Case("tiles of 64", _NarrowTiles, because="one scale for 64 latents"),
        Case("scales that are quotients", _Divided, because="scales are computed otherwise"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if _is_packed(node))

    def rewrite(self, match: Match) -> Plan:
        """Query and rows come from the same tokens; the whole row is written to one slot."""
        mode = int8.weight_mode(match)
        if not mode:
            source = match["token_x"].origin
            raise NoMatch(f"no projection is int8; {OPERATOR} packs rows beside int8 weights alone", source)
        caches = {name: cache_roles(match.reading(CacheUpdate, f"{name}.write")) for name in ("kv_cache", "kr_cache")}
        row = cache_roles(match.reading(CacheUpdate, "row.write"))
        dtype = caches["kr_cache"].update.row.dtype
        rows = row_axes(match, caches)
        found = weights(match, caches)
        norm, tiles = match.reading(RmsNorm, "ckv"), match.reading(QuantisedTiles, "tiles")
        norm.check_rows(found.columns["weight_dkv"])
        _check(match, mode, dtype)
        modes = {**MODES, "k_nope_clip_alpha": _alpha(tiles)}
        out = int8.call(match, mode, rows, found, _operands(row, dtype), **modes)
        b, s, n = match.dims("b s n")
        scale = query_scale(match, {*b, *s, *n})
        codes = match.reading(QuantisedTokens, "cq.codes")
        differences = dict.fromkeys((*codes.differences, *tiles.differences, *_differences(match, mode, dtype)))
        changed = replaced(match, numbered(out, RESULTS), rows, scale, {"kv_cache": row}, heads_at=1)
        return Plan(*changed, differences=[*differences], exact=(*codes.whole, *tiles.whole))


def _is_packed(anchor: Node) -> bool:
    latents, keys = (named_argument(anchor, name) for name in ("kv_cache", "kr_cache"))
    return keys is not None and packed_cache(latents, keys) is not None


def _operands(row: CacheRoles, dtype: torch.dtype) -> int8.CacheOperands:
    index = ByTarget(*(positions(row, is_skipped=is_skipped) for is_skipped in (False, True)))
    return int8.CacheOperands(dtype, index, old_cache(row), new_cache(row.update.old, dtype, 0))


def _alpha(tiles: QuantisedTiles) -> Expression:
    """The part of its largest value to which each tile is clipped, [1] in float32."""
    number, factor = tiles.number, tiles.factor
    if number <= 0 or (factor is not None and number != 1.0):
        raise NoMatch(f"the part to which tiles are clipped is multiplied by {number:.6g}", tiles.node)
    if factor is not None:
        return tensor(factor, ((),), dtype=torch.float32)
    device = tiles.node.meta["val"].device
    return Call(aten.full.default, [1], number, dtype=torch.float32, device=device, pin_memory=False)


# --- what the operator does not do -----------------------------------------------------------------------------------


def _check(match: Match, mode: int, dtype: torch.dtype) -> None:
    """Raises NoMatch unless the operator packs rows as the program does."""
    tiles = match.reading(QuantisedTiles, "tiles")
    if tiles.width != TILE:
        raise NoMatch(f"rows have one scale for {tiles.width} latents; {OPERATOR} writes one for {TILE}", tiles.node)
    factor = match.reading(RmsNorm, "ckv").factor
    if factor != 1.0:
        raise NoMatch(f"the latent is multiplied by a number, {factor:.6g}, before it is quantised", tiles.node)
    if mode == 1:
        int8.check_products(match, dtype, OPERATOR)


def _differences(match: Match, mode: int, dtype: torch.dtype) -> Iterator[str]:
    """Where the program's latents may differ in the last bit from the operator's, which rounds none of them."""
    norm, latent = match.reading(RmsNorm, "ckv"), match.reading(QuantisedTiles, "tiles").value
    coarsest = latent.coarsest or latent.dtype
    if is_coarser(coarsest, torch.float32):
        yield f"the latent is rounded to {coarsest} before it is quantised, in a kernel it is not"
    elif not _divides_in_order(norm):
        yield "the latent is normalised otherwise than as value / root * gamma, as a kernel does"
    if mode == 2 and not _is_dequantised_in_order(match):
        yield "the latent is dequantised otherwise than as integers * token scale * column scale in torch.float32"


def _divides_in_order(norm: RmsNorm) -> bool:
    """Whether a norm is value / root * gamma in float32. Another order has other last bits."""
    inner = [part for part in int8.factors_of(norm.node) if part is not norm.gamma.origin]
    stops = {norm.value.origin, norm.value.seen[0], norm.gamma.origin}
    is_wide = not any(rounded_in("", norm.node, stops))
    return is_wide and len(inner) == 1 and inner[0].target is aten.div.Tensor and _is_root(args_of(inner[0])[1])


def _is_root(value: object) -> bool:
    return isinstance(value, Node) and value.target is aten.sqrt.default


def _is_dequantised_in_order(match: Match) -> bool:
    value, column = match.reading(RmsNorm, "ckv").value, match["weight_dkv"].scales
    token = match["token_x"].scales
    assert token is not None and column is not None, "both are codes in mode 2"
    inner = [part for part in int8.factors_of(value.origin) if part is not column.by[0].origin]
    is_wide = value.origin.meta["val"].dtype == torch.float32 and not value.roundings
    return is_wide and len(inner) == 1 and token.by[0].origin in int8.factors_of(inner[0])
