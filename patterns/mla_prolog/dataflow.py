"""The dataflow of a prolog: how query, latents and rotary keys are computed from the hidden states."""

from __future__ import annotations

from mla_fx.rule import (
    CallPattern,
    Operand,
    Pattern,
    bound,
    contract,
    either,
    having,
    last_dimension,
    normed,
    quantised,
    refused,
    rms_norm,
    rope,
    scaled,
    stored,
    tokens,
    var,
)

TOKEN_X = var("token_x")
NORMED_QUERY = rms_norm(quantised(TOKEN_X, var("weight_dq"), name="dq"), var("gamma_cq"), name="cq")
Q_LATENT = bound(
    "q_latent",
    either(
        "query_rank",
        low=NORMED_QUERY,
        codes=tokens(NORMED_QUERY, name="cq.codes"),
        smoothed=tokens(scaled(NORMED_QUERY, var("smooth_scales_cq"), name="cq.smoothed"), name="cq.codes"),
        full=TOKEN_X,
        joined=refused(
            having(rms_norm(var("part"), var("gamma"), name="part.norm")),
            because="the query is computed from a normalised latent joined with something else",
        ),
    ),
)
KV_LATENT = rms_norm(quantised(TOKEN_X, var("weight_dkv"), name="dkv", over="h"), var("gamma_ckv"), name="ckv")


def _rotated(value: Pattern, operand: str) -> Pattern:
    return either(
        f"{operand}.rotation", rotated=rope(value, name=f"{operand}.rope", along=last_dimension(operand)), none=value
    )


def _scaled(value: Pattern, operand: str) -> Pattern:
    return scaled(value, var(f"{operand}.scale"), name=f"{operand}.scaled")


Q_NOPE = quantised(Q_LATENT, var("weight_uq"), name="uq", over="q")
Q_ROPE = quantised(Q_LATENT, var("weight_qr"), name="qr")
K_ROPE = either("k_rope", plain=quantised(TOKEN_X, var("weight_kr"), name="kr"), normed=normed("k_rope", "mla_prolog"))
# Rows are computed in one way, queries in several: what is wrong with a query is clearest once token_x is known.
# b and s: batch and tokens of the query, n heads, d nope, c latent and r rotary columns; a and t: rows of the cache, l
# its rotary columns; h hidden states, q the query's latent
QUERY = Operand(
    "bsnc",
    contract(
        either("query.scale", one=Q_NOPE, each=_scaled(Q_NOPE, "query"), normed=normed("q_nope", "mla_prolog")),
        var("weight_uk", "n d c"),
        name="uk",
        over="d",
    ),
)
QUERY_ROPE = Operand(
    "bsnr",
    either(
        "query_rope.scale",
        one=_rotated(Q_ROPE, "query_rope"),
        after=_scaled(_rotated(Q_ROPE, "query_rope"), "query_rope"),
        before=_rotated(_scaled(Q_ROPE, "query_rope"), "query_rope"),
    ),
    is_optional=True,
)
KR_ROW = _rotated(K_ROPE, "kr_cache")
KR_CACHE = Operand("atl", stored(KR_ROW, name="kr_cache.write", beside="kv_cache.write"), is_optional=True)


def over(latents: Pattern, keys: Operand = KR_CACHE) -> CallPattern:
    """Attention whose cached latents satisfy a pattern; k are their columns."""
    operands = {"kv_cache": Operand("atk", latents), "query": QUERY, "query_rope": QUERY_ROPE, "kr_cache": keys}
    return CallPattern(operands, fixed="bsn")
