"""mla_prolog: everything of one MLA layer from the hidden states to the attention, cache write included."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._cache import like_store, store, store_
from ._check import check_choice, check_index, check_rank, check_shape, check_tensors
from ._math import check_rope, latent_and_key, rms_norm, rope
from ._sample import Sampler
from .define import Sample, define

# For each cache mode the axes of token_x, and those of the caches before the last.
CACHE_MODES = {
    "PA_BSND": ("B, S, He or T, He", "BlockNum, BlockSize, 1"),
    "Norm": ("B, S, He", "B, 1, T"),
    "BSND": ("B, S, He", "B, S, 1"),
    "TND": ("T, He", "T, 1"),
}


def body(
    token_x: Tensor,
    weight_dq: Tensor | None,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor | None,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor | None,
    rope_cos: Tensor | None,
    cache_index: Tensor | None,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    rope_layout: str = "interleave_half",
    gamma_after_cast: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The absorbed query of MLA, and the caches with this step's latents::

        u          = RMSNorm(token_x @ weight_dq) @ weight_uq_qr     (token_x @ weight_uq_qr without weight_dq)
        query      = u[nope of head n] @ weight_uk[n]
        query_rope = RoPE(u[rope of head n])
        k          = token_x @ weight_dkv_kr
        kv_cache[cache_index] = RMSNorm(k[:Hckv]);  kr_cache[cache_index] = RoPE(k[Hckv:])

    token_x is [B, S, He] or [T, He]; weight_dq [He, Hcq] or None, together with rmsnorm_gamma_cq [Hcq]; weight_uq_qr
    [Hcq, N*(D+Dr)], for each head D nope then Dr rope columns; weight_uk [N, D, Hckv]; weight_dkv_kr [He, Hckv+Dr];
    rmsnorm_gamma_ckv [Hckv]; rope_sin and rope_cos [B or 1, S, Dr] or [T, Dr], both None for a model without rotation.
    Strides are free. Tensors share the dtype of token_x (bfloat16, float16, float32, float64); gammas and tables may be
    any of these. Matmuls round to it; RMSNorm runs in float32, or float64 for float64.

    cache_mode says what the caches [..., Hckv] and [..., Dr] and the int64 cache_index are:
    "PA_BSND" [BlockNum, BlockSize, 1, *], index [B, S] or [T] over the BlockNum*BlockSize slots;
    "Norm" [B, 1, T, *], index [B or 1, S] of positions inside the batch row;
    "BSND" [B, S, 1, *] and "TND" [T, 1, *], no index: the new rows in token order are the new cache.
    A negative index stores nothing for its token. Equal non-negative indices leave either row.

    rope_layout is (layout read)_(layout written), "interleave_half", "half_half" or "interleave_interleave".
    gamma_after_cast multiplies by gamma after rounding the normalised value, as Hugging Face does.

    Returns query [B, S, N, Hckv], query_rope [B, S, N, Dr] (or [T, N, *]), kv_cache_out, kr_cache_out; the twin
    `mla_prolog_` writes the caches instead and returns the first two. Raises ValueError for arguments that do not fit;
    index values are checked on the CPU only. Inference only.
    """
    *tokens, _ = token_x.shape
    heads, nope, rank = weight_uk.shape
    compressed = token_x
    if weight_dq is not None and rmsnorm_gamma_cq is not None:
        compressed = rms_norm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq, gamma_after_cast)
    up = (compressed @ weight_uq_qr).view(*tokens, heads, weight_uq_qr.shape[1] // heads)
    query = torch.bmm(up[..., :nope].flatten(0, -3).transpose(0, 1), weight_uk).transpose(0, 1).contiguous()
    cos, sin = (None if table is None else table.unsqueeze(-2) for table in (rope_cos, rope_sin))
    query_rope = rope(up[..., nope:], cos, sin, rope_layout).contiguous()
    kv = token_x @ weight_dkv_kr
    latent, key_rope = latent_and_key(
        kv, rmsnorm_gamma_ckv, rope_cos, rope_sin, rmsnorm_epsilon_ckv, rope_layout, gamma_after_cast
    )
    kv_cache = store(kv_cache, cache_index, latent, cache_mode)
    kr_cache = store(kr_cache, cache_index, key_rope, cache_mode)
    return query.view(*tokens, heads, rank), query_rope, kv_cache, kr_cache


def body_(*, cache_index: Tensor | None, kv_cache: Tensor, kr_cache: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    # Without an index, body returns the new rows in place of the caches.
    query, query_rope, latent, key_rope = body(cache_index=None, kv_cache=kv_cache, kr_cache=kr_cache, **rest)
    store_(kv_cache, cache_index, latent.squeeze(-2), rest["cache_mode"])
    store_(kr_cache, cache_index, key_rope.squeeze(-2), rest["cache_mode"])
    return query, query_rope


def check(**arguments: Any) -> None:
    a = SimpleNamespace(**arguments)
    free = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
    check_tensors(arguments, free=free, skip="cache_index")
    check_choice("cache_mode", a.cache_mode, tuple(CACHE_MODES))
    check_rank("token_x", a.token_x, CACHE_MODES[a.cache_mode][0])
    check_rank("weight_uk", a.weight_uk, "N, D, Hckv")
    *tokens, hidden = a.token_x.shape
    heads, nope, rank = a.weight_uk.shape
    check_shape("weight_dkv_kr", a.weight_dkv_kr, "He, Hckv+Dr", (hidden, None))
    width = a.weight_dkv_kr.shape[1] - rank
    check_shape("rmsnorm_gamma_ckv", a.rmsnorm_gamma_ckv, "Hckv", (rank,))
    letters = "B, S, Dr" if len(tokens) == 2 else "T, Dr"
    check_rope(width, a.rope_layout, letters, (*tokens, width), rope_sin=a.rope_sin, rope_cos=a.rope_cos)
    compressed = check_compression(a.weight_dq, a.rmsnorm_gamma_cq, hidden)
    check_shape("weight_uq_qr", a.weight_uq_qr, "Hcq, N*(D+Dr)", (compressed, heads * (nope + width)))
    check_caches(a, tokens, rank, width)


def check_compression(weight_dq: Tensor | None, gamma: Tensor | None, hidden: int) -> int:
    """The width of the compressed query."""
    if weight_dq is None and gamma is None:
        return hidden
    if weight_dq is None or gamma is None:
        raise ValueError("Only one of weight_dq and rmsnorm_gamma_cq is given; both must be tensors or both None.")
    check_shape("weight_dq", weight_dq, "He, Hcq", (hidden, None))
    check_shape("rmsnorm_gamma_cq", gamma, "Hcq", (weight_dq.shape[1],))
    return weight_dq.shape[1]


def check_caches(a: SimpleNamespace, tokens: list[int], rank: int, width: int) -> None:
    """The caches and cache_index fit cache_mode."""
    letters = CACHE_MODES[a.cache_mode][1]
    lead = {"PA_BSND": (None, None, 1), "Norm": (tokens[0], 1, None)}.get(a.cache_mode, (*tokens, 1))
    check_shape("kv_cache", a.kv_cache, f"{letters}, Hckv", (*lead, rank))
    check_shape("kr_cache", a.kr_cache, f"{letters}, Dr", (*a.kv_cache.shape[:-1], width))
    indexed = a.cache_mode in ("PA_BSND", "Norm")
    if indexed != (a.cache_index is not None):
        fault = "None; it must be an int64 tensor" if indexed else "given; it must be None"
        raise ValueError(f"cache_index is {fault} with cache_mode {a.cache_mode!r}.")
    if not indexed:
        return
    norm = a.cache_mode == "Norm"
    slots = a.kv_cache.shape[2] if norm else a.kv_cache.shape[0] * a.kv_cache.shape[1]
    check_shape("cache_index", a.cache_index, "B, S" if len(tokens) == 2 else "T", tokens, broadcast=norm)
    check_index("cache_index", a.cache_index, slots)


def fake(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = SimpleNamespace(**arguments)
    rows = (*a.token_x.shape[:-1], a.weight_uk.shape[0])
    query = a.token_x.new_empty(*rows, a.weight_uk.shape[2])
    query_rope = a.token_x.new_empty(*rows, a.kr_cache.shape[-1])
    return query, query_rope, like_store(a.kv_cache, a.cache_index), like_store(a.kr_cache, a.cache_index)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without query compression, rotation and skipped tokens."""
    yield sample(dtype, 0, "PA_BSND", (2, 3))
    yield sample(dtype, 1, "PA_BSND", (5,), skip=2, rope_layout="half_half", gamma_after_cast=True)
    yield sample(dtype, 2, "Norm", (2, 3), rope_layout="half_half", compress=False)
    yield sample(dtype, 3, "Norm", (2, 1), skip=1, rope_layout="interleave_interleave", rmsnorm_epsilon_cq=0.1)
    yield sample(dtype, 4, "BSND", (2, 3), rmsnorm_epsilon_ckv=0.1)
    args, kwargs = sample(dtype, 5, "TND", (4,))
    yield (*args[:7], None, None, *args[9:]), kwargs


def sample(
    dtype: torch.dtype, seed: int, mode: str, tokens: tuple[int, ...], skip: int = 0, compress: bool = True, **rest: Any
) -> Sample:
    hidden, heads, nope, rank, width, room = 32, 3, 8, 16, 4, 16
    query_rank = 24 if compress else hidden
    draw = Sampler(dtype, seed)
    index = draw.slots(torch.Size(tokens).numel(), room, skip)
    lead = {"PA_BSND": (room // 4, 4, 1), "Norm": (tokens[0], 1, room)}.get(mode, (*tokens, 1))
    arguments = (
        draw.normal(*tokens, hidden),
        draw.weight(hidden, query_rank, fan_in=hidden) if compress else None,
        draw.weight(query_rank, heads * (nope + width), fan_in=query_rank),
        draw.weight(heads, nope, rank, fan_in=nope),
        draw.weight(rank + width, hidden, fan_in=hidden).mT,
        draw.gamma(query_rank) if compress else None,
        draw.gamma(rank),
        *draw.tables(*tokens, width),
        index.view(tokens) if mode in ("PA_BSND", "Norm") else None,
        draw.normal(*lead, rank),
        draw.normal(*lead, width),
    )
    return arguments, {"cache_mode": mode, **rest}


operator = define(
    "mla_prolog",
    body,
    returns=("query", "query_rope", "kv_cache_out", "kr_cache_out"),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"kv_cache_out": "kv_cache", "kr_cache_out": "kr_cache"},
)
