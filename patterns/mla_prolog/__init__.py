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
from collections.abc import Iterator, Mapping

import torch
from torch.fx import Graph, Node

from mla_fx.readings.calls import named_argument
from mla_fx.readings.quantised_tokens import QuantisedTokens
from mla_fx.readings.sizes import product
from mla_fx.rewriting.operands import (
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    new_cache,
    positions_and_caches,
    replaced_cache,
    replaced_rows,
    tables,
)
from mla_fx.rule import (
    Appended,
    Axes,
    CacheUpdate,
    Call,
    CallPattern,
    Case,
    Cast,
    Element,
    Expression,
    Layer,
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
    behind,
    either,
    element_of,
    result,
    roles,
    shape_of,
    stored,
    tensor,
)

from . import cases, int8
from .dataflow import KR_CACHE, KV_LATENT, QUERY, QUERY_ROPE
from .factors import query_factor, query_scale
from .weights import Caches, Weights, query_norm, weights

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
    after = ("mla_prolog_quant",)
    targets = (torch.ops.mla_fx.latent_attention.default,)
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
        caches = _caches(match)
        rows = _rows(match, caches)
        found = weights(match, caches)
        check_norm_of_rows(match.reading(RmsNorm, "ckv"), found.columns["weight_dkv"])
        b, s, n, _ = roles(match, "query")
        scale = query_scale(match, {*b, *s, *n})
        if not mode:
            out = _call(match, rows, found, caches)
            return Plan(*_replaced(match, _numbered(out, RESULTS), rows, scale, caches, heads_at=2))
        out = int8.call(match, mode, rows, found, caches, _options(match))
        new = _numbered(out, int8.RESULTS)
        codes = match.reading(QuantisedTokens, "cq.codes")
        replaced = _replaced(match, new, rows, scale, caches, heads_at=1)
        return Plan(*replaced, differences=codes.differences, exact=codes.whole)


def _is_fused(anchor: Node) -> bool:
    """Whether an operator has computed the query already."""
    return element_of(named_argument(anchor, "query")).origin.target is operator.getitem


def _call(match: Match, rows: tuple[Axes, Axes], found: Weights, caches: Caches) -> Call:
    dtype = match["token_x"].dtype
    if dtype != (cache_dtype := _given(match)["kv_cache"].meta["val"].dtype):
        raise NoMatch(f"token_x is {dtype}, the cache {cache_dtype}", match["token_x"].origin)
    rotation = match.get(Rope, "kr_cache.rope")
    *index_and_caches, mode = _cache_operands(match, rows, caches)
    operands = (
        tensor(match["token_x"], (*rows, found.columns["he"])),
        *found.operands(dtype),
        *tables(rotation, ("sin", "cos"), rows, equal=match.get(Rope, "query_rope.rope")),
        *index_and_caches,
    )
    return Call(torch.ops.mla_fx.mla_prolog.default, *operands, **_options(match), cache_mode=mode)


def _numbered(out: Call, places: Mapping[str, int]) -> dict[str, Expression]:
    return {name: Call(operator.getitem, out, place) for name, place in places.items()}


def _given(match: Match) -> dict[str, Node]:
    return {name: match.readings[f"{name}.axes"].node for name in PATTERN.operands if f"{name}.axes" in match.readings}


def _caches(match: Match) -> Caches:
    """How latent and rotary key are cached: alike, or not at all."""
    latent, keys = match.get(CacheUpdate, "kv_cache.write"), match.get(CacheUpdate, "kr_cache.write")
    if "kr_cache" not in _given(match):
        return {"kv_cache": None if latent is None else cache_roles(latent), "kr_cache": None}
    if match.choices["kv_cache.write"] != match.choices["kr_cache.write"]:
        raise NoMatch("latent and rotary key are not cached in the same way", match.readings["kr_cache.axes"].node)
    if latent is None or keys is None:
        return {"kv_cache": None, "kr_cache": None}
    found = cache_roles(latent), cache_roles(keys)
    check_same_write(*found)
    return dict(zip(("kv_cache", "kr_cache"), found, strict=True))


def _rows(match: Match, caches: Caches) -> tuple[Axes, Axes]:
    """Batch and tokens in the operator's form: a cache without a batch is written by all tokens as one sequence.

    Raises NoMatch unless query and rows are computed from the same hidden states, token by token."""
    b, s, _, _ = roles(match, "query")
    latent = caches["kv_cache"]
    tokens = ((), (*b, *s)) if latent is not None and not latent.batch else (b, s)
    made = ((name, cache) for name, cache in caches.items() if name in _given(match))
    if any((cache.row if cache else roles(match, name)[:2]) != tokens for name, cache in made):
        raise NoMatch("query and cached rows are not computed from the same tokens", match["token_x"].origin)
    return tokens


def _cache_operands(
    match: Match, rows: tuple[Axes, Axes], caches: Caches
) -> tuple[Expression | None, Expression, Expression, str]:
    latent, keys = caches["kv_cache"], caches["kr_cache"]
    if latent is not None and not latent.update.is_appended:
        return *positions_and_caches(latent, keys), "Norm"
    given, x = _given(match), match["token_x"]
    lead = [product(axis.size for axis in role) for role in rows]
    widths = (shape_of(given[name])[-1] if name in given else 0 for name in ("kv_cache", "kr_cache"))
    kv_cache, kr_cache = (new_cache(x.origin, x.dtype, *lead, 1, width) for width in widths)
    return None, kv_cache, kr_cache, "BSND"


def _options(match: Match) -> dict[str, object]:
    norm, rotation, of_query = match.reading(RmsNorm, "ckv"), match.get(Rope, "kr_cache.rope"), query_norm(match)
    options: dict[str, object] = {"rmsnorm_epsilon_ckv": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
    scales = {"qc_qr_scale": query_factor(match), "kc_scale": norm.factor}
    options |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if of_query is not None:
        options["rmsnorm_epsilon_cq"] = of_query.epsilon
    if rotation is not None:
        options["rope_layout"] = rotation.layout
    return options


def _replaced(
    match: Match,
    results: Mapping[str, Expression],
    rows: tuple[Axes, Axes],
    scale: Element | None,
    caches: Caches,
    *,
    heads_at: int,
) -> Iterator[Replaced]:
    """Both parts of the query, and the caches, or the rows that are used directly. Rows have one head, in dimension
    `heads_at`."""
    given, n = _given(match), roles(match, "query")[2]
    for name, new in results.items():
        old = given.get(name)
        if old is None:
            continue
        cache = caches.get(name)
        if name not in caches:
            new = new if scale is None else Call(aten.mul.Tensor, new, tensor(scale, (*rows, n, ())))
            columns = roles(match, name)[-1]
            part = tensor(result(new, (*rows, n, columns)), roles(match, name))
            yield Replaced(old, Cast(part, old.meta["val"].dtype))
        elif cache is None:
            yield Replaced(old, Call(aten.squeeze.dim, new, heads_at))
        elif cache.update.is_appended:
            dims = [cache.batch, cache.token, cache.width]
            yield replaced_rows(cache, result(new, (*dims[: heads_at], (), *dims[heads_at:])))
        else:
            yield replaced_cache(cache, new)
