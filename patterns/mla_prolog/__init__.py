"""The prolog: everything between a layer's hidden states and its attention, including the cache write, as one operator.

    c     = rms_norm(token_x weight_dq) gamma_cq          or token_x itself, without a low-rank query
    q     = c weight_uq_qr = [q_nope, q_rope]             query = q_nope weight_uk, query_rope = rope(q_rope)
    k     = token_x weight_dkv_kr = [latent, k_rope]      caches[index] = rms_norm(latent) gamma_ckv, rope(k_rope)

Variants: with and without a low-rank query (DeepSeek-V2-Lite), with and without rotation (Kimi Linear), without any
rotary part (GLM-5 Next), with rows written into a cache (index_copy, index_put, scatter, slice), appended to one (cat),
or used directly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fx.matching.pattern import Pattern
from mla_fx.readings.calls import named_argument
from mla_fx.readings.sizes import product
from mla_fx.rewriting.operands import (
    CacheRoles,
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    joined_weights,
    last_dimension,
    new_cache,
    normed,
    positions_and_caches,
    replaced_cache,
    replaced_rows,
    rotary,
    tables,
)
from mla_fx.rewriting.weights import check_weight
from mla_fx.rule import (
    Appended,
    Axes,
    CacheUpdate,
    Call,
    CallPattern,
    Case,
    Cast,
    Contraction,
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
    bound,
    contract,
    either,
    having,
    refused,
    result,
    rms_norm,
    roles,
    rope,
    scaled,
    shape_of,
    stored,
    tensor,
    var,
)

from . import cases
from .factors import query_factor, query_scale

aten = torch.ops.aten
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}


TOKEN_X = var("token_x")
Q_LATENT = bound(
    "q_latent",
    either(
        "query_rank",
        low=rms_norm(contract(TOKEN_X, var("weight_dq"), name="dq"), var("gamma_cq"), name="cq"),
        full=TOKEN_X,
        joined=refused(
            having(rms_norm(var("part"), var("gamma"), name="part.norm")),
            because="the query is computed from a normalised latent joined with something else",
        ),
    ),
)
KV_LATENT = rms_norm(contract(TOKEN_X, var("weight_dkv"), name="dkv"), var("gamma_ckv"), name="ckv")


def _rotated(value: Pattern, operand: str) -> Pattern:
    return either(
        f"{operand}.rotation", rotated=rope(value, name=f"{operand}.rope", along=last_dimension(operand)), none=value
    )


def _scaled(value: Pattern, operand: str) -> Pattern:
    return scaled(value, var(f"{operand}.scale"), name=f"{operand}.scaled")


Q_NOPE = contract(Q_LATENT, var("weight_uq"), name="uq")
Q_ROPE = contract(Q_LATENT, var("weight_qr"), name="qr")
K_ROPE = either("k_rope", plain=contract(TOKEN_X, var("weight_kr"), name="kr"), normed=normed("k_rope", "mla_prolog"))
# Rows are computed in one way, queries in several: what is wrong with a query is clearest once token_x is known.
# b and s: batch and tokens of the query, n heads, c latent and r rotary columns; a and t: rows of the caches, k latent
# and l rotary columns
QUERY = Operand(
    "bsnc",
    contract(
        either("query.scale", one=Q_NOPE, each=_scaled(Q_NOPE, "query"), normed=normed("q_nope", "mla_prolog")),
        var("weight_uk"),
        name="uk",
    ),
)
KV_CACHE = Operand("atk", stored(KV_LATENT, name="kv_cache.write"))
PATTERN = CallPattern(
    {
        "kv_cache": KV_CACHE,
        "query": QUERY,
        "query_rope": Operand(
            "bsnr",
            either(
                "query_rope.scale",
                one=_rotated(Q_ROPE, "query_rope"),
                after=_scaled(_rotated(Q_ROPE, "query_rope"), "query_rope"),
                before=_rotated(_scaled(Q_ROPE, "query_rope"), "query_rope"),
            ),
        ),
        "kr_cache": Operand(
            "atl",
            stored(_rotated(K_ROPE, "kr_cache"), name="kr_cache.write", beside="kv_cache.write"),
        ),
    },
    fixed="bsn",
)
WITHOUT_ROTARY_PART = CallPattern({"kv_cache": KV_CACHE, "query": QUERY}, fixed="bsn")
RESULTS = ("query", "query_rope", "kv_cache", "kr_cache")


class MlaProlog(Rule):
    stage = "prolog"
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

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        has_rotary_part = named_argument(anchor, "query_rope") is not None
        return (PATTERN if has_rotary_part else WITHOUT_ROTARY_PART).at(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        """Weights are parts of one matrix each; query and key come from the same tokens, and are rotated and written
        alike."""
        _check_products(match)
        latent, keys = _caches(match)
        tokens = _tokens(match, latent)
        _check_rows(match, tokens, latent, keys)
        check_norm_of_rows(match.reading(RmsNorm, "ckv"), _width(match, "kv_cache", latent))
        options, (b, s, n, _) = _options(match), roles(match, "query")
        scale = query_scale(match, {*b, *s, *n})
        given, dtype = _given(match), match["token_x"].dtype
        if dtype != (cache_dtype := given["kv_cache"].meta["val"].dtype):
            raise NoMatch(f"token_x is {dtype}, the cache {cache_dtype}", match["token_x"].origin)
        rotation = match.get(Rope, "kr_cache.rope")
        *index_and_caches, mode = _cache_operands(match, latent, keys, tokens)
        operands = (
            tensor(match["token_x"], (*tokens, match.reading(Contraction, "dkv").axes)),
            *_weights(match, dtype, latent, keys),
            *tables(rotation, ("sin", "cos"), tokens, equal=match.get(Rope, "query_rope.rope")),
            *index_and_caches,
        )
        out = Call(torch.ops.mla_fx.mla_prolog.default, *operands, **options, cache_mode=mode)
        return Plan(*_replaced(match, out, tokens, scale, {"kv_cache": latent, "kr_cache": keys}))


def _given(match: Match) -> dict[str, Node]:
    return {name: match.readings[f"{name}.axes"].node for name in PATTERN.operands if f"{name}.axes" in match.readings}


def _check_products(match: Match) -> None:
    for name in ("dq", "dkv", "kr"):
        found = match.get(Contraction, name)
        if found is not None and found.factor != 1.0:
            raise NoMatch(f"a projection of the prolog is multiplied by {found.factor:.6g}", found.node)
    for name in ("weight_dq", "weight_uq", "weight_qr", "weight_uk", "weight_dkv", "weight_kr"):
        if name in match.elements:
            check_weight(match[name], name, may_be_dequantised=name == "weight_uk")


def _caches(match: Match) -> tuple[CacheRoles | None, CacheRoles | None]:
    latent, keys = match.get(CacheUpdate, "kv_cache.write"), match.get(CacheUpdate, "kr_cache.write")
    if "kr_cache" not in _given(match):
        return None if latent is None else cache_roles(latent), None
    if match.choices["kv_cache.write"] != match.choices["kr_cache.write"]:
        raise NoMatch("latent and rotary key are not cached in the same way", match.readings["kr_cache.axes"].node)
    if latent is None or keys is None:
        return None, None
    found = cache_roles(latent), cache_roles(keys)
    check_same_write(*found)
    return found


def _check_rows(match: Match, tokens: tuple[Axes, Axes], latent: CacheRoles | None, keys: CacheRoles | None) -> None:
    """Query and rows are computed from the same hidden states, token by token."""
    caches = {"kv_cache": latent, "kr_cache": keys}
    made = ((name, cache) for name, cache in caches.items() if name in _given(match))
    if any((cache.row if cache else roles(match, name)[:2]) != tokens for name, cache in made):
        raise NoMatch("query and cached rows are not computed from the same tokens", match["token_x"].origin)


def _width(match: Match, operand: str, cache: CacheRoles | None) -> Axes:
    return cache.width if cache else roles(match, operand)[2]


def _tokens(match: Match, latent: CacheRoles | None) -> tuple[Axes, Axes]:
    """Batch and tokens in the operator's form: a cache without a batch is written by all tokens as one sequence."""
    b, s, _, _ = roles(match, "query")
    return ((), (*b, *s)) if latent is not None and not latent.batch else (b, s)


def _weights(
    match: Match, dtype: torch.dtype, latent: CacheRoles | None, keys: CacheRoles | None
) -> list[Expression | None]:
    """weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr and both gammas; without a low-rank query, two are None."""
    _, _, n, hckv = roles(match, "query")
    query_norm = _query_norm(match)
    d, he = match.reading(Contraction, "uk").axes, match.reading(Contraction, "dkv").axes
    hcq, width = he, _width(match, "kv_cache", latent)
    if query_norm is not None:
        hcq = match.reading(Contraction, "uq").axes
        check_norm_of_rows(query_norm, hcq)
    uq_qr, dkv_kr = (match["weight_uq"], d), (match["weight_dkv"], width)
    if "query_rope" in _given(match):
        qr = rotary(match, "query_rope", roles(match, "query_rope")[3])
        uq_qr = joined_weights(match, ("weight_uq", d), ("weight_qr", qr), "q_nope and q_rope")
        kr = rotary(match, "kr_cache", _width(match, "kr_cache", keys))
        dkv_kr = joined_weights(match, ("weight_dkv", width), ("weight_kr", kr), "latent and rotary key")

    def weight(element: Element, *dims: Axes) -> Expression:
        return tensor(element, dims, dtype=dtype)

    return [
        None if query_norm is None else weight(match["weight_dq"], he, hcq),
        weight(uq_qr[0], hcq, (*n, *uq_qr[1])),
        weight(match["weight_uk"], n, d, hckv),
        weight(dkv_kr[0], he, dkv_kr[1]),
        None if query_norm is None else tensor(match["gamma_cq"], (hcq,)),
        tensor(match["gamma_ckv"], (width,)),
    ]


def _query_norm(match: Match) -> RmsNorm | None:
    if match.choices["query_rank"] == "full":
        return None
    norm, query_norm = match.reading(RmsNorm, "ckv"), match.reading(RmsNorm, "cq")
    if query_norm.gamma_after_cast != norm.gamma_after_cast:
        raise NoMatch("the two norms of the prolog round in different places", query_norm.gamma.origin)
    return query_norm


def _cache_operands(
    match: Match, latent: CacheRoles | None, keys: CacheRoles | None, tokens: tuple[Axes, Axes]
) -> tuple[Expression | None, Expression, Expression, str]:
    if latent is not None and not latent.update.is_appended:
        return *positions_and_caches(latent, keys), "Norm"
    given, x = _given(match), match["token_x"]
    lead = [product(axis.size for axis in role) for role in tokens]
    widths = (shape_of(given[name])[-1] if name in given else 0 for name in ("kv_cache", "kr_cache"))
    kv_cache, kr_cache = (new_cache(x.origin, x.dtype, *lead, 1, width) for width in widths)
    return None, kv_cache, kr_cache, "BSND"


def _options(match: Match) -> dict[str, object]:
    norm, query_norm, rotation = match.reading(RmsNorm, "ckv"), _query_norm(match), match.get(Rope, "kr_cache.rope")
    options: dict[str, object] = {"rmsnorm_epsilon_ckv": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
    scales = {"qc_qr_scale": query_factor(match), "kc_scale": norm.factor}
    options |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if query_norm is not None:
        options["rmsnorm_epsilon_cq"] = query_norm.epsilon
    if rotation is not None:
        options["rope_layout"] = rotation.layout
    return options


def _replaced(
    match: Match, out: Call, tokens: tuple[Axes, Axes], scale: Element | None, caches: dict[str, CacheRoles | None]
) -> Iterator[Replaced]:
    """Both parts of the query, and the caches, or the rows that are used directly."""
    given, n = _given(match), roles(match, "query")[2]
    for place, name in enumerate(RESULTS):
        old, new = given.get(name), Call(operator.getitem, out, place)
        if old is None:
            continue
        cache = caches.get(name)
        if name not in caches:
            new = new if scale is None else Call(aten.mul.Tensor, new, tensor(scale, (*tokens, n, ())))
            columns = roles(match, name)[-1]
            part = tensor(result(new, (*tokens, n, columns)), roles(match, name))
            yield Replaced(old, Cast(part, old.meta["val"].dtype))
        elif cache is None:
            yield Replaced(old, Call(aten.squeeze.dim, new, 2))
        elif cache.update.is_appended:
            yield replaced_rows(cache, result(new, (cache.batch, cache.token, (), cache.width)))
        else:
            yield replaced_cache(cache, new)
