"""The prolog: everything between a layer's hidden states and its attention, cache write included, as one operator.

    c     = rms_norm(token_x weight_dq) gamma_cq          or token_x itself, without a low-rank query
    q     = c weight_uq_qr = [q_nope, q_rope]             query = q_nope weight_uk, query_rope = rope(q_rope)
    k     = token_x weight_dkv_kr = [latent, k_rope]      caches[index] = rms_norm(latent) gamma_ckv, rope(k_rope)

Seen with and without a low-rank query (DeepSeek-V2-Lite), with and without rotation (Kimi Linear), with rows written
into a cache (index_copy, index_put, scatter, slice), appended to one (cat), or used as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from mla_fx.canonical.contraction import Contraction
from mla_fx.canonical.element import Element, is_parameter
from mla_fx.canonical.rope import Rope
from mla_fx.canonical.views import shape_of
from mla_fx.cases import DR, HCKV, HE, Case, D, Layer, N, S, T
from mla_fx.errors import NoMatch
from mla_fx.match import CallPattern, Match, Pattern, Trail, contract, either, rms_norm, rope, stored, var
from mla_fx.operands import (
    Axes,
    CacheRoles,
    Joined,
    axes_of,
    cache_roles,
    check_same_rotation,
    check_same_write,
    emit_cache,
    emit_positions,
    emit_table,
    joined,
    last_dimension,
    only,
    replace_cache,
    replace_rows,
)
from mla_fx.rewrite import Emitter, view_key
from mla_fx.rule import Rule

aten = torch.ops.aten
ONE_EACH = {"mla_prolog": 1, "latent_attention": 1}
LATENT_ATTENTION = torch.ops.mla_fx.latent_attention.default


TOKEN_X = var("token_x")
Q_LATENT = either(
    "query_rank",
    low=rms_norm(contract(TOKEN_X, var("weight_dq"), name="dq"), var("gamma_cq"), name="cq"),
    full=TOKEN_X,
)
KV_LATENT = rms_norm(contract(TOKEN_X, var("weight_dkv"), name="dkv"), var("gamma_ckv"), name="ckv")


def _rotated(value: Pattern, operand: str) -> Pattern:
    return either(
        f"{operand}.rotation", rotated=rope(value, name=f"{operand}.rope", along=last_dimension(operand)), none=value
    )


PATTERN = CallPattern(
    {
        "query": contract(contract(Q_LATENT, var("weight_uq"), name="uq"), var("weight_uk"), name="uk"),
        "query_rope": _rotated(contract(Q_LATENT, var("weight_qr"), name="qr"), "query_rope"),
        "kv_cache": stored(KV_LATENT, name="kv_cache.write"),
        "kr_cache": stored(_rotated(contract(TOKEN_X, var("weight_kr"), name="kr"), "kr_cache"), name="kr_cache.write"),
    }
)


@dataclass(frozen=True)
class Facts:
    match: Match
    node: Node
    weight_uq_qr: Joined
    weight_dkv_kr: Joined
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


class _Appended(Layer):
    """A cache that grows by cat."""

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        old = self.kv_cache[:, :, : T - S], self.kr_cache[:, :, : T - S]
        return torch.cat((old[0], latent), dim=2), torch.cat((old[1], k_rope), dim=2)


class _Bias(Layer):
    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kv = nn.functional.linear(x, self.kv_a, torch.ones(HCKV + DR))
        latent, k_rope = kv.split([HCKV, DR], dim=-1)
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
    accepts = (
        Case("low-rank query, halves rotated, rows written", Layer, ONE_EACH),
        Case("direct query", _DirectQuery, ONE_EACH),
        Case("complex rotation", _Complex, ONE_EACH),
        Case("no rotation", _NoRotation, ONE_EACH),
        Case("rows appended", _Appended, ONE_EACH),
    )
    rejects = (
        Case("projection with a bias", _Bias, because="has a bias"),
        Case("LayerNorm", _LayerNorm, because="LayerNorm"),
        Case("key rotated by other tables", _OtherTables, because="different tensors"),
        Case("query made from other tokens", _OtherTokens, because="token_x is not one tensor"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return iter(graph.find_nodes(op="call_function", target=LATENT_ATTENTION))

    def bindings(self, anchor: Node, trail: Trail) -> Iterator[Match]:
        operands = dict(zip(("query", "query_rope", "kv_cache", "kr_cache"), anchor.args, strict=False))
        for match in PATTERN.bindings(anchor, operands, trail):
            yield match.read("node", anchor)

    def check(self, match: Match) -> Facts:
        """Weights are parts of one matrix each; query and key are rotated and written alike."""
        reads = match.readings
        for name in ("dq", "uq", "uk", "qr", "dkv", "kr"):
            if name in reads and reads[name].scale != 1.0:
                raise NoMatch(f"a projection of the prolog is multiplied by {reads[name].scale:.6g}", reads[name].node)
        for name in ("weight_dq", "weight_uq", "weight_qr", "weight_uk", "weight_dkv", "weight_kr"):
            if name in match.elements and not is_parameter(match[name].node):
                raise NoMatch(f"{name} is computed by the graph, expected a parameter", match[name].node)
        b, s, _, _ = _roles(match, "query")
        latent, keys = _caches(match)
        _check_token_x(match, _tokens((b, s), latent), _row(match, "kv_cache", latent))
        rotations = reads.get("query_rope.rope"), reads.get("kr_cache.rope")
        outer = _tokens(_roles(match, "query_rope")[:2], latent)
        check_same_rotation(*rotations, outer, _row(match, "kr_cache", keys))
        return Facts(match, reads["node"], _weight_uq_qr(match), _weight_dkv_kr(match, latent, keys), latent, keys)

    def rewrite(self, emit: Emitter, facts: Facts) -> None:
        match, node = facts.match, facts.node
        reads = match.readings
        b, s, n, c = _roles(match, "query")
        low_rank = match.choices["query_rank"] == "low"
        tokens = _tokens((b, s), facts.latent)
        x = emit.tensor(match["token_x"], (*tokens, (reads["dq"] if low_rank else reads["uq"]).axes))
        dtype = x.meta["val"].dtype
        if dtype != node.args[2].meta["val"].dtype:
            raise NoMatch(f"token_x is {dtype}, the cache {node.args[2].meta['val'].dtype}", x)

        def weight(element: Element, *dims: Axes) -> Node:
            return emit.tensor(element, dims, dtype=dtype)

        a = reads["uq"].axes
        weight_uq_qr = weight(facts.weight_uq_qr.element, a, (*n, facts.weight_uq_qr.axis))
        weight_dkv_kr = weight(facts.weight_dkv_kr.element, reads["dkv"].axes, (facts.weight_dkv_kr.axis,))
        weight_uk = weight(match["weight_uk"], n, reads["uk"].axes, c)
        weight_dq = weight(match["weight_dq"], reads["dq"].axes, a) if low_rank else None
        gamma_cq = emit.tensor(match["gamma_cq"], (a,)) if low_rank else None
        gamma_ckv = emit.tensor(match["gamma_ckv"], (tuple(match["gamma_ckv"].axes),))
        sin, cos = _tables(emit, facts)
        index, kv_cache, kr_cache, mode = _cache_operands(emit, facts, x)
        options = _norm_options(match)
        out = emit.call(
            torch.ops.mla_fx.mla_prolog.default,
            *(
                x,
                weight_dq,
                weight_uq_qr,
                weight_uk,
                weight_dkv_kr,
                gamma_cq,
                gamma_ckv,
                sin,
                cos,
                index,
                kv_cache,
                kr_cache,
            ),
            **options,
            cache_mode=mode,
        )
        query, query_rope, kv_cache_out, kr_cache_out = (emit.call(operator.getitem, out, item) for item in range(4))
        r = _roles(match, "query_rope")
        node.update_arg(0, emit.tensor(emit.result(query, (*tokens, n, c)), (b, s, n, c)))
        rope_tokens = _tokens(r[:2], facts.latent)
        node.update_arg(1, emit.tensor(emit.result(query_rope, (*rope_tokens, *r[2:])), r))
        for position, roles, result in ((2, facts.latent, kv_cache_out), (3, facts.keys, kr_cache_out)):
            if roles is None:
                node.update_arg(position, emit.call(aten.squeeze.dim, result, 2))
            elif mode == "BSND":
                replace_rows(emit, roles, result)
            else:
                replace_cache(emit, roles, result)


def _roles(match: Match, operand: str) -> tuple[Axes, ...]:
    return tuple(axes_of(part) for part in match.readings[f"{operand}.axes"])


def _caches(match: Match) -> tuple[CacheRoles | None, CacheRoles | None]:
    latent, keys = match.readings["kv_cache.write"], match.readings["kr_cache.write"]
    if match.choices["kv_cache.write"] != match.choices["kr_cache.write"]:
        raise NoMatch("latent and rotary key are not cached in the same way", match.readings["node"])
    if latent is None:
        return None, None
    roles = cache_roles(latent), cache_roles(keys)
    check_same_write(*roles)
    return roles


def _tokens(tokens: tuple[Axes, ...], latent: CacheRoles | None) -> tuple[Axes, Axes]:
    """Batch and token axes as the operator takes them: one row of all tokens, if the cache has no batch of its own."""
    batch, token = tokens
    return ((), (*batch, *token)) if latent is not None and not latent.batch else (batch, token)


def _row(match: Match, operand: str, roles: CacheRoles | None) -> tuple[Axes, Axes]:
    """Batch and token axes of the new rows."""
    if roles is not None:
        return roles.row
    batch, token, _ = _roles(match, operand)
    return batch, token


def _check_token_x(match: Match, query: tuple[Axes, Axes], row: tuple[Axes, Axes]) -> None:
    """The hidden states that make the query are those that make the rows, token by token."""
    reads = match.readings
    down: Contraction = reads["dq"] if match.choices["query_rank"] == "low" else reads["uq"]
    mine = view_key(match["token_x"], (*query, down.axes))
    other: Contraction = reads["dkv"]
    element = other.left if other.left.node is match["token_x"].node else other.right
    if view_key(element, (*row, other.axes)) != mine:
        raise NoMatch("query and cached rows are not made from the same tokens", element.node)


def _weight_uq_qr(match: Match) -> Joined:
    reads = match.readings
    rotation: Rope | None = reads.get("query_rope.rope")
    rope_axis = (
        rotation.axis if rotation else only(_roles(match, "query_rope")[3], "the rotary dimension", reads["qr"].node)
    )
    e = only(reads["uk"].axes, "the nope dimension", reads["uk"].node)
    n, n_rope = _roles(match, "query")[2], _roles(match, "query_rope")[2]
    renamed = dict(zip((*n_rope, *reads["qr"].axes), (*n, *reads["uq"].axes), strict=False))
    whole = joined(match["weight_uq"], e, match["weight_qr"], rope_axis, renamed)
    if whole is None:
        raise NoMatch("the weights of q_nope and q_rope are not neighbours in one matrix", match["weight_qr"].node)
    return whole


def _weight_dkv_kr(match: Match, latent: CacheRoles | None, keys: CacheRoles | None) -> Joined:
    reads = match.readings
    width = only(latent.width if latent else _roles(match, "kv_cache")[2], "the latent", reads["dkv"].node)
    rotation: Rope | None = reads.get("kr_cache.rope")
    plain_width = keys.width if keys else _roles(match, "kr_cache")[2]
    rope_width = rotation.axis if rotation else only(plain_width, "the rotary key", reads["kr"].node)
    renamed = dict(zip(reads["kr"].axes, reads["dkv"].axes, strict=False))
    whole = joined(match["weight_dkv"], width, match["weight_kr"], rope_width, renamed)
    if whole is None:
        raise NoMatch("the weights of latent and rotary key are not neighbours in one matrix", match["weight_kr"].node)
    return whole


def _tables(emit: Emitter, facts: Facts) -> tuple[Node | None, Node | None]:
    rotation: Rope | None = facts.match.readings.get("query_rope.rope")
    if rotation is None:
        return None, None
    outer = _tokens(_roles(facts.match, "query_rope")[:2], facts.latent)
    return emit_table(emit, rotation.sin, rotation.pair, outer), emit_table(emit, rotation.cos, rotation.pair, outer)


def _cache_operands(emit: Emitter, facts: Facts, x: Node) -> tuple[Node | None, Node, Node, str]:
    if facts.latent is not None and facts.keys is not None and facts.latent.update.position is not None:
        caches = emit_cache(emit, facts.latent), emit_cache(emit, facts.keys)
        return emit_positions(emit, facts.latent), *caches, "Norm"
    batch, tokens = (emit.size(size) for size in shape_of(x)[:2])
    width, rope_width = (shape_of(facts.node.args[position])[-1] for position in (2, 3))
    like = {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}
    kv_cache, kr_cache = (
        emit.call(aten.empty.memory_format, [batch, tokens, 1, size], **like) for size in (width, rope_width)
    )
    return None, kv_cache, kr_cache, "BSND"


def _norm_options(match: Match) -> dict[str, object]:
    norm, query_norm = match.readings["ckv"], match.readings.get("cq")
    if query_norm is not None and query_norm.gamma_after_cast != norm.gamma_after_cast:
        raise NoMatch("the two norms of the prolog round at different places", query_norm.gamma.node)
    rotation = match.readings.get("query_rope.rope")
    options: dict[str, object] = {"rmsnorm_epsilon_ckv": norm.epsilon, "gamma_after_cast": norm.gamma_after_cast}
    if query_norm is not None:
        options["rmsnorm_epsilon_cq"] = query_norm.epsilon
    if rotation is not None:
        options["rope_layout"] = rotation.layout
    return options
