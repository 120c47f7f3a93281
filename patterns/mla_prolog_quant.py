"""The prolog of DeepSeek-V3.2 on NPUs: an int8 query projection, and latents that are written as codes and scales.

    c, c_scale    = int8(rms_norm(token_x w_dq) gamma_cq)
    q             = (c w_uq_qr) c_scale dequant_scale = [q_nope, q_rope]
    query         = q_nope w_uk,                            query_rope = rope(q_rope)
    k             = token_x w_dkv_kr = [latent, k_rope]
    codes, scales = int8(rms_norm(latent) gamma_ckv)        one scale for each quarter of a latent
    kv_cache[index] = codes,   k_scale_cache[index] = scales,   kr_cache[index] = rope(k_rope)

The program's own code dequantises what attention reads. Codes and scales in caches are visible, so a program that
computes them otherwise than the operator is refused, unless it asks for the vendor's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from mla_fx.cases import DR, DV, HCKV, Case, D, Layer, N, T
from mla_fx.rule import CallPattern, Match, NearestMiss, NoMatch, Operand, Pattern, Plan, Rule
from mla_fx.rule.caches import (
    CacheRoles,
    CacheUpdate,
    cache_roles,
    cache_update,
    caches_behind,
    check_same_write,
    positions,
)
from mla_fx.rule.codes import QUOTIENT, QuantisedTiles, QuantisedTokens, Scaling, quantised_tiles, rounded_in
from mla_fx.rule.indices import Axes, Axis, product
from mla_fx.rule.operands import (
    LATENT_ATTENTION,
    ByTarget,
    Call,
    Cast,
    Expression,
    Replaced,
    replaced,
    result,
    tables,
    tensor,
)
from mla_fx.rule.readings import Element, OperandAxes, RmsNorm, Rope, element_of, is_coarser, named_argument

from .mla_prolog.calls import key_rotation
from .mla_prolog.dataflow import KR_CACHE, KV_LATENT, QUERY, QUERY_ROPE
from .mla_prolog.factors import query_factor, query_scale
from .mla_prolog.int8 import check_products, check_query, factors_of, of_query
from .mla_prolog.weights import PARTS, Weights, weights

aten = torch.ops.aten
ONE_EACH = {"mla_prolog_quant": 1, "latent_attention": 1}
OPERATOR, LAYOUT, TILES = "mla_prolog_quant", "interleave_half", 4
QUERIES = {"query": 2, "query_rope": 3}
CACHES = {"kv_cache": 4, "kr_cache": 5, "k_scale_cache": 6}
INT8 = ("weight_uq", "weight_qr")
RECIPROCALS = (aten.rsqrt.default, aten.reciprocal.default)


# --- the pattern -----------------------------------------------------------------------------------------------------


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


PATTERN = CallPattern(
    {"kv_cache": Operand("atk", _Tiled(KV_LATENT)), "query": QUERY, "query_rope": QUERY_ROPE, "kr_cache": KR_CACHE},
    fixed="bsn",
)


# --- cases -----------------------------------------------------------------------------------------------------------


class _FourTiles(Layer):
    """One sequence, with caches of slots."""

    tiles = TILES

    def __init__(self) -> None:
        super().__init__()
        scales = self.q_b.data.abs().amax(1) / 127
        codes = (self.q_b.data / scales.unsqueeze(1)).round().to(torch.int8)
        del self.q_b
        self.q_b_scales: Tensor
        self.scale_cache: Tensor
        self.register_buffer("q_b", codes)
        self.register_buffer("q_b_scales", scales)
        codes, scales = self.quantise(self.kv_cache[0, 0].view(T, self.tiles, -1))
        self.kv_cache, self.kr_cache = codes.flatten(1), self.kr_cache[0, 0]
        self.register_buffer("scale_cache", scales.squeeze(-1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, position: Tensor) -> Tensor:
        tokens = x[0]
        query = self.query(tokens).view(-1, N, D + DR)
        latent, k_rope = torch.split(nn.functional.linear(tokens, self.kv_a), [HCKV, DR], dim=-1)
        q_rope = self.rotate(query[..., D:], cos.unsqueeze(1), sin.unsqueeze(1))
        self.write(self.norm(latent, self.kv_gamma), self.rotate(k_rope, cos, sin), position)
        expanded = (self.latents() @ self.kv_b.T).view(T, N, D + DV)
        key = torch.cat((expanded[..., :D], self.kr_cache.unsqueeze(1).expand(-1, N, -1)), dim=-1)
        scores = torch.einsum("snd,tnd->nst", torch.cat((query[..., :D], q_rope), dim=-1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(T) > position[:, None], -torch.inf)
        return torch.einsum("nst,tnv->snv", scores.softmax(-1), expanded[..., D:]).flatten(1) @ self.o.T

    def query(self, x: Tensor) -> Tensor:
        codes, scales = self.quantise(self.norm(x @ self.q_a.T, self.q_gamma))
        return (codes.int() @ self.q_b.int().T).float() * scales * self.q_b_scales

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.abs().amax(-1, keepdim=True)
        factor = torch.full_like(largest, 127.0) / largest
        return (x * factor).round().to(torch.int8), 1 / factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin)

    def write(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> None:
        codes, scales = self.quantise(latent.view(-1, self.tiles, HCKV // self.tiles))
        self.kv_cache.index_copy_(0, position, codes.flatten(1))
        self.scale_cache.index_copy_(0, position, scales.squeeze(-1))
        self.kr_cache.index_copy_(0, position, k_rope)

    def latents(self) -> Tensor:
        tiles = self.kv_cache.view(T, self.tiles, -1).float()
        return (tiles * self.scale_cache.unsqueeze(-1)).flatten(1)


class _FiveTiles(_FourTiles):
    tiles = 5


class _OtherFactor(_FourTiles):
    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x / scales).round().to(torch.int8), scales


class _Halves(_FourTiles):
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Layer.rotate(self, x, cos, sin)


class _PlainQuery(_FourTiles):
    def query(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.q_a.T, self.q_gamma) @ (self.q_b.float() * self.q_b_scales.unsqueeze(1)).T


# --- the rule --------------------------------------------------------------------------------------------------------


class MlaPrologQuant(Rule):
    stage = "prolog"
    targets = LATENT_ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (Case("latents in four tiles", _FourTiles, ONE_EACH),)
    rejects = (
        Case("latents in five tiles", _FiveTiles, because="latents have 5 scales"),
        Case("values divided by scales", _OtherFactor, because="codes are computed otherwise"),
        Case("halves rotated", _Halves, because="rotated in layout half_half"),
        Case("q_b dequantised", _PlainQuery, because="int8 weights of q_b alone; weight_uq is torch.float32"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if _is_tiled(node))

    def rewrite(self, match: Match) -> Plan:
        """Codes, scales and rotary keys are written to the same slots; query and rows come from the same tokens."""
        b, s, n = match.dims("b s n")
        rows, dtype = (*b, *s), match["token_x"].dtype
        caches = _caches(match, rows)
        _check_weights(match)
        _check_dtypes(match, caches["kr_cache"], dtype)
        _check_factors(match, {*rows, *n})
        found = weights(match, caches)
        match.reading(RmsNorm, "ckv").check_rows(found.columns["weight_dkv"])
        out = _call(match, rows, found, caches)
        tiles, codes = match.reading(QuantisedTiles, "tiles"), match.reading(QuantisedTokens, "cq.codes")
        differences = dict.fromkeys(_differences(match, tiles, codes, dtype))
        replacements = (*_queries(match, out, rows, n), *(_cache(out, name, caches[name]) for name in CACHES))
        return Plan(*replacements, differences=[*differences], exact=(*tiles.whole, *codes.whole))


def _is_tiled(anchor: Node) -> bool:
    """Whether attention is over latents from a cache of codes and a cache of scales, with rotary keys from a third."""
    has_rotary_part = named_argument(anchor, "kr_cache") is not None
    return has_rotary_part and _quantised_caches(element_of(named_argument(anchor, "kv_cache"))) is not None


def _call(match: Match, rows: Axes, weights: Weights, caches: Mapping[str, CacheRoles]) -> Call:
    x, he = match["token_x"], weights.columns["he"]
    dq, uq_qr, uk, dkv_kr, gamma_cq, gamma_ckv = weights.operands(x.dtype)
    scales, smooth = of_query(match, weights)
    latent, keys, tiles = (caches[name] for name in CACHES)
    index = ByTarget(*(positions(latent, keys, tiles, is_skipped=is_skipped) for is_skipped in (False, True)))
    operands = (
        *(tensor(x, (rows, he)), dq, uq_qr, Call(aten.t.default, scales), uk, dkv_kr, gamma_cq, gamma_ckv),
        *tables(_rotation(match), ("cos", "sin"), (rows,), equal=match.get(Rope, "query_rope.rope"), expand=True),
        *(Call(aten.squeeze.dim, index, 0), *map(_old, (latent, keys, tiles)), smooth),
    )
    epsilons = {f"epsilon_{name}": match.reading(RmsNorm, name).epsilon for name in ("cq", "ckv")}
    return Call(torch.ops.mla_fx.mla_prolog_quant.default, *operands, **epsilons)


def _rotation(match: Match) -> Rope:
    rotation = key_rotation(match, OPERATOR)
    if rotation.layout != LAYOUT:
        raise NoMatch(f"the key is rotated in layout {rotation.layout}; {OPERATOR} has {LAYOUT}", rotation.node)
    return rotation


def _old(cache: CacheRoles) -> Expression:
    """A cache before the write, as one page [1, Slots, 1, Width]."""
    return tensor(Element(cache.update.old, cache.update.index), ((), cache.slot, (), cache.width))


def _cache(out: Call, name: str, cache: CacheRoles) -> Replaced:
    new = result(Call(operator.getitem, out, CACHES[name]), ((), cache.slot, (), cache.width))
    return replaced(cache.update.node, cache.update.index, new)


def _queries(match: Match, out: Call, rows: Axes, n: Axes) -> Iterator[Replaced]:
    for name, place in QUERIES.items():
        old, dims = match.reading(OperandAxes, f"{name}.axes").node, match.roles(name)
        new = tensor(result(Call(operator.getitem, out, place), (rows, n, dims[-1])), dims)
        yield Replaced(old, Cast(new, old.meta["val"].dtype))


# --- what the operator does not do -----------------------------------------------------------------------------------


def _caches(match: Match, rows: Axes) -> dict[str, CacheRoles]:
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
    if any(cache.token != rows for cache in found.values()):
        raise NoMatch("query and cached rows are not computed from the same tokens", match["token_x"].origin)
    return found


def _check_weights(match: Match) -> None:
    for name in PARTS:
        if name not in match.elements or name == "weight_uk":
            continue
        weight, is_int8 = match[name], name in INT8
        stored = weight.origin.meta["val"].dtype
        if (stored == torch.int8) != is_int8 or (weight.scales is not None) != is_int8:
            raise NoMatch(f"{OPERATOR} takes int8 weights of q_b alone; {name} is {stored}", weight.origin)


def _check_dtypes(match: Match, keys: CacheRoles, dtype: torch.dtype) -> None:
    """Raises NoMatch unless the program multiplies and stores in the dtypes in which the operator does."""
    check_query(match, dtype, OPERATOR)
    of_rope = match["weight_qr"].scales
    if of_rope is not None and is_coarser(dtype, of_rope.dtype):
        raise NoMatch(f"q_rope is in {of_rope.dtype}, {OPERATOR} rounds it to {dtype}", match["weight_qr"].origin)
    check_products(match, dtype, OPERATOR)
    scales = match.reading(CacheUpdate, "k_scale_cache.write").node
    for name, node, wanted in (("keys", keys.update.node, dtype), ("scales", scales, torch.float32)):
        if (stored := node.meta["val"].dtype) != wanted:
            raise NoMatch(f"the cache of {name} is {stored}; {OPERATOR} has {wanted}", node)


def _check_factors(match: Match, allowed: set[Axis]) -> None:
    """Raises NoMatch if a number or a tensor multiplies the query or the latents."""
    norm = match.reading(RmsNorm, "ckv")
    for what, factor in (("query", query_factor(match)), ("latent", norm.factor)):
        if factor != 1.0:
            raise NoMatch(f"the {what} is multiplied by a number, {factor:.6g}", norm.node)
    scale = query_scale(match, allowed)
    if scale is not None:
        raise NoMatch(f"the query is multiplied by a tensor, which {OPERATOR} does not take", scale.origin)


def _differences(
    match: Match, tiles: QuantisedTiles, codes: QuantisedTokens, dtype: torch.dtype
) -> Iterator[str]:
    """Where the program's codes and scales may differ from the operator's."""
    yield from codes.differences
    yield from tiles.differences
    smoothed = match.get(Scaling, "cq.smoothed")
    query = codes.value if smoothed is None else smoothed.value
    yield from _other_roundings("the query's latent", query, match.reading(RmsNorm, "cq"), dtype)
    norm = match.reading(RmsNorm, "ckv")
    yield from _other_roundings("the latent", tiles.value, norm, dtype)
    if not norm.gamma_after_cast and not _multiplies_in_order(norm):
        yield "the latent is normalised otherwise than as gamma * (value * (1 / root)), as a kernel does"


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
