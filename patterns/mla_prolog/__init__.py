"""The prolog: everything between a layer's hidden states and its attention, including the cache write, as one operator.

    c     = rms_norm(token_x weight_dq) gamma_cq          or token_x itself, without a low-rank query
    q     = c weight_uq_qr = [q_nope, q_rope]             query = q_nope weight_uk, query_rope = rope(q_rope)
    k     = token_x weight_dkv_kr = [latent, k_rope]      caches[index] = rms_norm(latent) gamma_ckv, rope(k_rope)

Variants: with and without a low-rank query (DeepSeek-V2-Lite), with and without rotation (Kimi Linear), without any
rotary part (GLM-5 Next), with rows written into a cache (index_copy, index_put, scatter, slice), appended to one (cat),
or used directly. Projections may be int8: see int8.py.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from mla_fx.cases import Appended, Case, Layer, NoRotaryPart
from mla_fx.rule import CallPattern, Match, NearestMiss, NoMatch, Operand, Plan, Rule, behind, either, stored
from mla_fx.rule.caches import CacheUpdate, cache_roles, check_same_write, new_cache, positions_and_caches
from mla_fx.rule.codes import QuantisedTokens
from mla_fx.rule.indices import Axes, product
from mla_fx.rule.operands import LATENT_ATTENTION, Call, Expression, tables, tensor
from mla_fx.rule.readings import RmsNorm, Rope, element_of, named_argument, shape_of

from . import cases, int8
from .calls import given, numbered, options, replaced, row_axes
from .dataflow import KR_CACHE, KV_LATENT, QUERY, QUERY_ROPE
from .factors import query_scale
from .weights import Caches, Weights, weights

aten = torch.ops.aten
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}

# a and t: rows of the caches, k latent columns
WRITTEN = stored(KV_LATENT, name="kv_cache.write")
KV_CACHE = Operand("atk", either("kv_cache.read", plain=WRITTEN, quantised=behind(WRITTEN)))
PATTERN = CallPattern(
    {"kv_cache": KV_CACHE, "query": QUERY, "query_rope": QUERY_ROPE, "kr_cache": KR_CACHE}, fixed="bsn"
)
WITHOUT_ROTARY_PART = CallPattern({"kv_cache": KV_CACHE, "query": QUERY}, fixed="bsn")
RESULTS = {"query": 0, "query_rope": 1, "kv_cache": 2, "kr_cache": 3}


class MlaProlog(Rule):
    stage = "prolog"
    after = ("mla_prolog_quant", "mla_prolog_packed")
    targets = LATENT_ATTENTION
    pattern = PATTERN
    yields_to_target = True
    accepts = (
        Case("low-rank query, halves rotated, rows written", Layer, ONE_EACH),
        Case("direct query", cases.DirectQuery, ONE_EACH),
        Case("complex rotation", cases.Complex, ONE_EACH),
        Case("no rotation", cases.NoRotation, ONE_EACH),
        Case("no rotary part", NoRotaryPart, ONE_EACH),
        Case("rows appended", Appended, ONE_EACH),
        Case("query and latent multiplied by numbers", cases.Scaled, ONE_EACH),
        Case("query multiplied by a number per token and head", cases.ScaledByToken, ONE_EACH),
    )
    rejects = (
        Case("projection with a bias", cases.Bias, because="has a bias"),
        Case("LayerNorm", cases.LayerNorm, because="LayerNorm"),
        Case("key rotated by other tables", cases.OtherTables, because="different tensors"),
        Case("query computed from other tokens", cases.OtherTokens, because="token_x is not one tensor"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if not _is_fused(node))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        has_rotary_part = named_argument(anchor, "query_rope") is not None
        return (PATTERN if has_rotary_part else WITHOUT_ROTARY_PART).at(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        """Weights are parts of one matrix each; query and key come from the same tokens, and are rotated and written
        alike."""
        mode = int8.weight_mode(match)
        caches = _caches(match, may_be_nz=not mode)
        rows = row_axes(match, caches)
        found = weights(match, caches)
        match.reading(RmsNorm, "ckv").check_rows(found.columns["weight_dkv"])
        b, s, n = match.dims("b s n")
        scale = query_scale(match, {*b, *s, *n})
        if not mode:
            out = _call(match, rows, found, caches)
            return Plan(*replaced(match, numbered(out, RESULTS), rows, scale, caches, heads_at=2))
        out = int8.call(match, mode, rows, found, int8.plain_caches(match, caches, rows))
        new = numbered(out, int8.RESULTS)
        codes = match.reading(QuantisedTokens, "cq.codes")
        changed = replaced(match, new, rows, scale, caches, heads_at=1)
        return Plan(*changed, differences=codes.differences, exact=codes.whole)


def _is_fused(anchor: Node) -> bool:
    """Whether an operator has computed the query already."""
    return element_of(named_argument(anchor, "query")).origin.target is operator.getitem


def _call(match: Match, rows: tuple[Axes, Axes], found: Weights, caches: Caches) -> Call:
    dtype = match["token_x"].dtype
    if dtype != (cache_dtype := given(match)["kv_cache"].meta["val"].dtype):
        raise NoMatch(f"token_x is {dtype}, the cache {cache_dtype}", match["token_x"].origin)
    rotation = match.get(Rope, "kr_cache.rope")
    *index_and_caches, mode = _cache_operands(match, rows, caches)
    operands = (
        tensor(match["token_x"], (*rows, found.columns["he"])),
        *found.operands(dtype),
        *tables(rotation, ("sin", "cos"), rows, equal=match.get(Rope, "query_rope.rope"), expand=not rows[0]),
        *index_and_caches,
    )
    return Call(torch.ops.mla_fx.mla_prolog.default, *operands, **options(match), cache_mode=mode)


def _caches(match: Match, *, may_be_nz: bool) -> Caches:
    """How latent and rotary key are cached: alike, or not at all."""
    latent, keys = match.get(CacheUpdate, "kv_cache.write"), match.get(CacheUpdate, "kr_cache.write")
    if "kr_cache" not in given(match):
        roles_of_latent = None if latent is None else cache_roles(latent, may_be_nz=may_be_nz)
        return {"kv_cache": roles_of_latent, "kr_cache": None}
    if match.choices["kv_cache.write"] != match.choices["kr_cache.write"]:
        raise NoMatch("latent and rotary key are not cached in the same way", match.readings["kr_cache.axes"].node)
    if latent is None or keys is None:
        return {"kv_cache": None, "kr_cache": None}
    found = cache_roles(latent, may_be_nz=may_be_nz), cache_roles(keys, may_be_nz=may_be_nz)
    check_same_write(*found)
    return dict(zip(("kv_cache", "kr_cache"), found, strict=True))


def _cache_operands(
    match: Match, rows: tuple[Axes, Axes], caches: Caches
) -> tuple[Expression | None, Expression, Expression, str]:
    latent, keys = caches["kv_cache"], caches["kr_cache"]
    if latent is not None and not latent.update.is_appended:
        return *positions_and_caches(latent, keys), latent.mode
    made, x = given(match), match["token_x"]
    lead = [product(axis.size for axis in role) for role in rows]
    widths = (shape_of(made[name])[-1] if name in made else 0 for name in ("kv_cache", "kr_cache"))
    kv_cache, kr_cache = (new_cache(x.origin, x.dtype, *lead, 1, width) for width in widths)
    return None, kv_cache, kr_cache, "BSND"
