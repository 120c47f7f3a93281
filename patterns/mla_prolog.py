"""The prolog: everything between a layer's hidden states and its attention, cache write included, as one operator.

    c     = rms_norm(token_x weight_dq) gamma_cq          or token_x itself, without a low-rank query
    q     = c weight_uq_qr = [q_nope, q_rope]             query = q_nope weight_uk, query_rope = rope(q_rope)
    k     = token_x weight_dkv_kr = [latent, k_rope]      caches[index] = rms_norm(latent) gamma_ckv, rope(k_rope)

Seen with and without a low-rank query (DeepSeek-V2-Lite), with and without rotation (Kimi Linear), without any rotary
part (GLM-5 Next), with rows written into a cache (index_copy, index_put, scatter, slice), appended to one (cat), or
used as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node

from mla_fx.cases import DR, HCKV, HE, Appended, B, Case, D, Layer, N, NoRotaryPart, S
from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match
from mla_fx.matching.pattern import (
    CallPattern,
    NearestMiss,
    Operand,
    Pattern,
    bound,
    contract,
    either,
    having,
    rms_norm,
    rope,
    scaled,
    stored,
    twin,
    var,
)
from mla_fx.readings.cache_update import CacheUpdate
from mla_fx.readings.calls import named_argument
from mla_fx.readings.contraction import Contraction
from mla_fx.readings.element import Element
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope
from mla_fx.readings.views import shape_of
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.factors import query_factor, query_scale
from mla_fx.rewriting.materialize import Axes, result, tensor
from mla_fx.rewriting.operands import (
    CacheRoles,
    cache_roles,
    check_norm_of_rows,
    check_same_write,
    check_weight,
    emit_caches,
    emit_new_cache,
    emit_tables,
    joined_weights,
    last_dimension,
    normed,
    replace_cache,
    replace_rows,
    roles,
    rotary,
)
from mla_fx.rewriting.replacement import Replacement
from mla_fx.rule import Rule

aten = torch.ops.aten
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}


TOKEN_X = var("token_x")
Q_LATENT = bound(
    "q_latent",
    either(
        "query_rank",
        low=rms_norm(contract(TOKEN_X, var("weight_dq"), name="dq"), var("gamma_cq"), name="cq"),
        full=TOKEN_X,
        joined=twin(
            having(rms_norm(var("part"), var("gamma"), name="part.norm")),
            because="the query is made of a normed latent joined with more, mla_prolog makes it of one latent",
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
# Rows are made in one way, queries in several: whatever is wrong with a query is told best once token_x is known.
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


Weight = tuple[Element, Axes]


@dataclass(frozen=True)
class Facts:
    """`tokens` are batch and tokens as the operator takes them, `n` and `hckv` heads and latent columns of the query,
    `he` and `hcq` the columns of hidden states and query latents; the weights of two parts come with the columns of
    both. `rotation` is that of the key, beside which the query is multiplied by the number `qc_qr_scale`; the tensor
    `query_scale` multiplies what the operator returns. What has no rotary part has no `keys`."""

    match: Match
    tokens: tuple[Axes, Axes]
    n: Axes
    hckv: Axes
    he: Axes
    hcq: Axes
    weight_uq_qr: Weight
    weight_dkv_kr: Weight
    norm: RmsNorm
    query_norm: RmsNorm | None
    rotation: Rope | None
    qc_qr_scale: float
    query_scale: Element | None
    latent: CacheRoles | None
    keys: CacheRoles | None


class _DirectQuery(Layer):
    """DeepSeek-V2-Lite: no low-rank query."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(N * (D + DR), HE) * HE**-0.5)

    def query(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.q)


class _Complex(Layer):
    """DeepSeek's own code: rotation as a product of complex numbers, read and written interleaved."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = torch.complex(cos[..., : DR // 2], sin[..., : DR // 2])
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], DR // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


class _NoRotation(Layer):
    """Kimi Linear: the last columns of query and key are shared but not rotated."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x


class _Scaled(Layer):
    """LongCat: query and latent are multiplied by numbers."""

    def query(self, x: Tensor) -> Tensor:
        return super().query(x) * 1.5

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = super().rows(x)
        return latent * 0.75, k_rope


class _ScaledByToken(Layer):
    """Mistral 4: the query is multiplied by a number for each position; Mistral Large 4: and for each head."""

    def query(self, x: Tensor) -> Tensor:
        scale = torch.arange(1.0, S + 1).view(S, 1, 1) + torch.linspace(0, 1, N).view(N, 1)
        return super().query(x).view(B, S, N, D + DR) * scale


class _Bias(Layer):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv = nn.functional.linear(x, self.kv_a, torch.ones(HCKV + DR))
        latent, k_rope = torch.split(kv, [HCKV, DR], dim=-1)
        return self.norm(latent, self.kv_gamma).unsqueeze(1), k_rope.unsqueeze(1)


class _LayerNorm(Layer):
    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, gamma.shape, gamma)


class _OtherTables(Layer):
    def rotate_key(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.rotate(x, sin, cos)


class _OtherTokens(Layer):
    def query(self, x: Tensor) -> Tensor:
        return super().query(x.flip(1))


class MlaProlog(Rule[Facts]):
    stage = "prolog"
    targets = (torch.ops.mla_fx.latent_attention.default,)
    pattern = PATTERN
    yields_to_target = True
    accepts = (
        Case("low-rank query, halves rotated, rows written", Layer, ONE_EACH),
        Case("direct query", _DirectQuery, ONE_EACH),
        Case("complex rotation", _Complex, ONE_EACH),
        Case("no rotation", _NoRotation, ONE_EACH),
        Case("no rotary part", NoRotaryPart, ONE_EACH),
        Case("rows appended", Appended, ONE_EACH),
        Case("query and latent multiplied by numbers", _Scaled, ONE_EACH),
        Case("query multiplied by a number for each token and head", _ScaledByToken, ONE_EACH),
    )
    rejects = (
        Case("projection with a bias", _Bias, because="has a bias"),
        Case("LayerNorm", _LayerNorm, because="LayerNorm"),
        Case("key rotated by other tables", _OtherTables, because="different tensors"),
        Case("query made from other tokens", _OtherTokens, because="token_x is not one tensor"),
    )

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        has_rotary_part = named_argument(anchor, "query_rope") is not None
        return (PATTERN if has_rotary_part else WITHOUT_ROTARY_PART).at(anchor, nearest)

    def check(self, match: Match) -> Facts:
        """Weights are parts of one matrix each; query and key come from the same tokens, rotated and written alike."""
        _check_products(match)
        latent, keys = _caches(match)
        b, s, n, hckv = roles(match, "query")
        tokens = ((), (*b, *s)) if latent is not None and not latent.batch else (b, s)
        _check_rows(match, tokens, latent, keys)
        norm, query_norm = match.reading(RmsNorm, "ckv"), _query_norm(match)
        width = _width(match, "kv_cache", latent)
        check_norm_of_rows(norm, width)
        rotation = match.get(Rope, "kr_cache.rope")
        factor, scale = query_factor(match), query_scale(match, {*b, *s, *n})
        he = hcq = match.reading(Contraction, "dkv").axes
        if query_norm is not None:
            hcq = match.reading(Contraction, "uq").axes
            check_norm_of_rows(query_norm, hcq)
        uq_qr = match["weight_uq"], match.reading(Contraction, "uk").axes
        dkv_kr = match["weight_dkv"], width
        if "query_rope" in _given(match):
            qr = rotary(match, "query_rope", roles(match, "query_rope")[3])
            uq_qr = joined_weights(match, ("weight_uq", uq_qr[1]), ("weight_qr", qr), "q_nope and q_rope")
            kr = rotary(match, "kr_cache", _width(match, "kr_cache", keys))
            dkv_kr = joined_weights(match, ("weight_dkv", width), ("weight_kr", kr), "latent and rotary key")
        weights, norms = (uq_qr, dkv_kr), (norm, query_norm)
        return Facts(match, tokens, n, hckv, he, hcq, *weights, *norms, rotation, factor, scale, latent, keys)

    def rewrite(self, emit: Emitter, facts: Facts) -> Iterator[Replacement]:
        match, tokens, n, hckv = facts.match, facts.tokens, facts.n, facts.hckv
        given = _given(match)
        x = tensor(emit, match["token_x"], (*tokens, facts.he))
        dtype = x.meta["val"].dtype
        if dtype != (held := given["kv_cache"].meta["val"].dtype):
            raise NoMatch(f"token_x is {dtype}, the cache {held}", x)

        def weight(element: Element, *dims: Axes) -> Node:
            return tensor(emit, element, dims, dtype=dtype)

        (uq_qr, query_columns), (dkv_kr, key_columns) = facts.weight_uq_qr, facts.weight_dkv_kr
        *index_and_caches, mode = _cache_operands(emit, facts, x)
        operands = (
            x,
            weight(match["weight_dq"], facts.he, facts.hcq) if facts.query_norm else None,
            weight(uq_qr, facts.hcq, (*n, *query_columns)),
            weight(match["weight_uk"], n, match.reading(Contraction, "uk").axes, hckv),
            weight(dkv_kr, facts.he, key_columns),
            tensor(emit, match["gamma_cq"], (facts.hcq,)) if facts.query_norm else None,
            tensor(emit, match["gamma_ckv"], (_width(match, "kv_cache", facts.latent),)),
            *emit_tables(emit, facts.rotation, ("sin", "cos"), facts.tokens),
            *index_and_caches,
        )
        target = torch.ops.mla_fx.mla_prolog.default
        out = emit.call(target, *operands, **_options(facts), cache_mode=mode)
        made = [emit.call(operator.getitem, out, place) for place in range(4)]
        if facts.query_scale is not None:
            scale = tensor(emit, facts.query_scale, (*tokens, n, ()))
            made[:2] = (emit.call(aten.mul.Tensor, part, scale) for part in made[:2])
        caches = {"kv_cache": facts.latent, "kr_cache": facts.keys}
        for name, new in zip(RESULTS, made, strict=True):
            old, cache = given.get(name), caches.get(name)
            if old is None:
                continue
            if name not in caches:
                part = result(new, (*tokens, n, roles(match, name)[-1]))
                yield Replacement(old, tensor(emit, part, roles(match, name), dtype=old.meta["val"].dtype))
            elif cache is None:
                yield Replacement(old, emit.call(aten.squeeze.dim, new, 2))
            elif mode == "BSND":
                yield replace_rows(emit, cache, result(new, (cache.batch, cache.token, (), cache.width)))
            else:
                yield replace_cache(emit, cache, new)


def _given(match: Match) -> dict[str, Node]:
    return {name: match.readings[f"{name}.axes"].node for name in PATTERN.operands if f"{name}.axes" in match.readings}


def _check_products(match: Match) -> None:
    for name in ("dq", "dkv", "kr"):
        found = match.get(Contraction, name)
        if found is not None and found.factor != 1.0:
            raise NoMatch(f"a projection of the prolog is multiplied by {found.factor:.6g}", found.node)
    for name in ("weight_dq", "weight_uq", "weight_qr", "weight_uk", "weight_dkv", "weight_kr"):
        if name in match.elements:
            check_weight(match[name], name)


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
    """The hidden states that make the query are those that make the rows, token by token."""
    caches = {"kv_cache": latent, "kr_cache": keys}
    made = ((name, cache) for name, cache in caches.items() if name in _given(match))
    if any((cache.row if cache else roles(match, name)[:2]) != tokens for name, cache in made):
        raise NoMatch("query and cached rows are not made from the same tokens", match["token_x"].origin)


def _width(match: Match, operand: str, cache: CacheRoles | None) -> Axes:
    return cache.width if cache else roles(match, operand)[2]


def _query_norm(match: Match) -> RmsNorm | None:
    if match.choices["query_rank"] == "full":
        return None
    norm, query_norm = match.reading(RmsNorm, "ckv"), match.reading(RmsNorm, "cq")
    if query_norm.gamma_after_cast != norm.gamma_after_cast:
        raise NoMatch("the two norms of the prolog round at different places", query_norm.gamma.origin)
    return query_norm


def _cache_operands(emit: Emitter, facts: Facts, x: Node) -> tuple[Node | None, Node, Node, str]:
    if facts.latent is not None and facts.latent.update.position is not None:
        return *emit_caches(emit, facts.latent, facts.keys), "Norm"
    given = _given(facts.match)
    widths = (shape_of(given[name])[-1] if name in given else 0 for name in ("kv_cache", "kr_cache"))
    kv_cache, kr_cache = (emit_new_cache(emit, x, *shape_of(x)[:2], 1, width) for width in widths)
    return None, kv_cache, kr_cache, "BSND"


def _options(facts: Facts) -> dict[str, object]:
    norm, query_norm = facts.norm, facts.query_norm
    options: dict[str, object] = {"rmsnorm_epsilon_ckv": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
    scales = {"qc_qr_scale": facts.qc_qr_scale, "kc_scale": norm.factor}
    options |= {name: scale for name, scale in scales.items() if scale != 1.0}
    if query_norm is not None:
        options["rmsnorm_epsilon_cq"] = query_norm.epsilon
    if facts.rotation is not None:
        options["rope_layout"] = facts.rotation.layout
    return options
