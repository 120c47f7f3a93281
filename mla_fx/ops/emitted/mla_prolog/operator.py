"""mla_prolog and mla_prolog_v3: everything of one MLA layer from the hidden states to the attention, cache write
included, with int8 weights and caches rounded as the vendor's kernel rounds."""

import functools
import math

import torch
from torch import Tensor

from mla_fx.ops.common.cache import like_store, page_slots, ragged_page_slots, store
from mla_fx.ops.common.cast import i8_half_round, i8_trunc, int_matmul, quantize_rows
from mla_fx.ops.common.define import define
from mla_fx.ops.common.math import accumulation_dtype, rescaled, rope, to_accumulation_dtype, wide_rms_norm

from .arguments import TILE, Arguments, Prolog, V3Arguments, stored_key
from .check import as_v3, check, check_v3
from .samples import samples, samples_v3

CACHES = {"kv_cache_out": "kv_cache", "kr_cache_out": "kr_cache"}

Queries = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def body_v3(a: Prolog) -> Results:
    """The absorbed query of MLA and the caches with this step's latents, with the int8 modes of A2 and A3 chips::

        n          = RMSNorm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq) * qc_qr_scale
        u          = n @ weight_uq_qr
        query      = u[nope of head n] @ weight_uk[n]
        query_rope = RoPE(u[rope of head n])
        k          = token_x @ weight_dkv_kr
        ckv        = RMSNorm(k[:Hckv], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv) * kc_scale;  kr = RoPE(k[Hckv:])
        kv_cache[cache_index] = ckv;  kr_cache[cache_index] = kr

    Shapes: token_x [B, S, He] or [T, He]; weight_dq [He, Hcq]; weight_uq_qr [Hcq, N*(D+Dr)], for each head D nope then
    Dr rope columns; weight_uk [N, D, Hckv]; weight_dkv_kr [He, Hckv+Dr]; rmsnorm_gamma_cq [Hcq]; rmsnorm_gamma_ckv
    [Hckv]; rope_sin and rope_cos [B, S, Dr] or [T, Dr]. Sizes are free. The dtype of weight_uk (bfloat16, float16,
    float32, float64) is that of everything unquantised, not float32 in kv_cache_quant_mode 3; gammas and tables may
    have any of these. Norms, rotations and scales run in float32, or float64 for float64.

    weight_quant_mode, and the scales (float32, or float64 for float64) that it takes, all factors that turn integers
    back into values:

    - 0: nothing is int8. The three products of token_x and n are rounded to the dtype, as is n.
    - 1: weight_uq_qr is int8 with dequant_scale_w_uq_qr [1, N*(D+Dr)], one scale per column. n is not rounded but made
      int8 with a scale per token, after a product with smooth_scales_cq [1, Hcq] if given.
    - 2: as 1, and token_x, weight_dq, weight_dkv_kr are int8 too, with dequant_scale_x [B*S or T, 1],
      dequant_scale_w_dq [1, Hcq], dequant_scale_w_dkv_kr [1, Hckv+Dr]. Nothing is rounded before it is normalised.

    In every mode the nope part of u is rounded before its product with weight_uk. In modes 1 and 2 the rope part is
    rounded after its rotation only.

    kv_cache_quant_mode, with the scales that it takes, all factors that values are multiplied by, to be rounded to the
    nearest int8:

    - 0, with any weight_quant_mode: both caches have the dtype.
    - 1, with weight_quant_mode 2 and query_quant_mode 1: kv_cache is int8, `ckv * quant_scale_ckv`, a scale [1]. query
      is int8 with dequant_scale_q_nope; query_rope is multiplied by `quant_scale_ckv / dequant_scale_q_nope`, for an
      attention that applies one scale to the sum of both scores.
    - 2, with weight_quant_mode 1: both caches are int8, by quant_scale_ckv [1, Hckv] and quant_scale_ckr [1, Dr]; kr
      is rounded to the dtype before.
    - 3, with weight_quant_mode 1 or 2 and ckvkr_repo_mode and quant_scale_repo_mode 1: kv_cache is int8 with rows of
      Hckv + 2*Dr + Hckv/128*4 bytes (656 for 512 and 64): int8 latents, 16-bit kr (float32 for float64, which takes
      4*Dr bytes, and with which a compiler compares rewrites), one float32 scale for each
      tile_size = 128 latents, `max|ckv| * alpha / 127`, where k_nope_clip_alpha [1] is alpha; latents are clipped to
      +- `max|ckv| * alpha`. kr_cache is an empty tensor [0]. cache_mode is "PA_BSND", "BSND", "TND" or "Norm".

    query_quant_mode, ckvkr_repo_mode and quant_scale_repo_mode are 0 in the other modes. weight_quant_mode
    3 to 5, float8 and hifloat8 of newer chips, is refused.

    cache_mode defines the caches [..., Hckv] and [..., Dr] and the int64 cache_index:

    - "PA_BSND" [BlockNum, BlockSize, 1, *], index [B, S] or [T] over the BlockNum*BlockSize slots;
    - "PA_NZ" the same, in pages of the FRACTAL_NZ format: the bytes of a page are those of [*/n0, BlockSize, n0], where
      n0 elements are 32 bytes and divide the width;
    - "PA_BLK_BSND", "PA_BLK_NZ" the same pages, index [B, ceil(S/BlockSize)] of block ids: each sequence fills its
      blocks from the start of the first. With token_x [T, He] also actual_seq_len [B], a host list or an int32 or int64
      tensor with the sums of lengths up to each sequence, T the last; index [sum of ceil(length/BlockSize)];
    - "BSND" [B, S, 1, *] and "TND" [T, 1, *], no index: the new rows in token order are the new cache;
    - "Norm" [B, 1, T, *], index [B or 1, S] of positions inside the batch row.

    BlockSize is a multiple of 16 up to 1024. Only axis 0 of a cache may have gaps. A negative index stores nothing for
    its token or block. Duplicate slots: which row is stored is undefined. A cache without blocks stores nothing.

    Returns query [B, S, N, Hckv] and query_rope [B, S, N, Dr] (or [T, N, *]); dequant_scale_q_nope [B*S or T, N, 1],
    float32; query_norm [B, S, Hcq] or [T, Hcq], n as it meets weight_uq_qr, and its dequant_scale_q_norm [B*S or T, 1],
    float32, of n after smoothing; kv_cache_out; kr_cache_out. query_norm_flag asks for query_norm. A result that a mode
    does not have is an empty tensor [0]. In place, `mla_prolog_v3_` writes the caches and returns the others.

    Three things are not in the source, for plain code has them: cache_mode "Norm"; rope_layout, (layout read)_(layout
    written), "interleave_half", "half_half" or "interleave_interleave"; and gamma_after_cast, which rounds a normalised
    value, multiplies it by gamma and rounds again, before it is quantised, as Hugging Face does.

    Source: torch_npu.npu_mla_prolog_v3, the in-place form, and its npu_mla_prolog_v3_functional; the arguments named
    *_dtype, float8 of newer chips, are left out. If sources disagree: query is quantised in kv_cache_quant_mode 1
    alone, though the page says so of 3; weight_uq_qr has one scale per column, not per token; the int8 query rounds by
    way of float16, each time with ties away from zero, as the kernel does; k is rounded before its norm, which the
    reference does not do; indices below 0 skip, which the page does not allow. As in the kernel nothing guards a row of
    zeros: it is stored as zeros with scale 0, and in kv_cache_quant_mode 1 its query_rope is not finite.

    Raises ValueError for arguments that do not fit; values of indices and lengths are checked on the CPU only, unless
    within `check_values`. Inference only.
    """
    return *queries(a), *stored(a)


def body_v3_(a: Prolog) -> Queries:
    results = queries(a)
    stored(a, in_place=True)
    return results


def stored(a: Prolog, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """Both caches with the new rows."""
    slots, (kv_rows, kr_rows) = token_slots(a), key_rows(a)
    kv_cache = store(a.kv_cache, slots, kv_rows, a.cache_mode, in_place=in_place)
    if kr_rows is None:
        return kv_cache, a.kr_cache if in_place else a.kr_cache.clone()
    return kv_cache, store(a.kr_cache, slots, kr_rows, a.cache_mode, in_place=in_place)


def queries(a: Prolog) -> Queries:
    """The five results that are not caches."""
    *tokens, _ = a.token_x.shape
    heads, nope, rank = a.weight_uk.shape
    dtype = a.weight_uk.dtype
    cos, sin = (None if table is None else table.unsqueeze(1) for table in tables(a))
    query_norm, norm_scale = normed_query(a)
    up = product(query_norm, a.weight_uq_qr, norm_scale, a.dequant_scale_w_uq_qr, dtype)
    up = up.view(up.shape[0], heads, a.weight_uq_qr.shape[1] // heads)
    query = torch.bmm(up[..., :nope].to(dtype).transpose(0, 1), a.weight_uk).transpose(0, 1).contiguous()
    query_rope = rope(up[..., nope:], cos, sin, a.rope_layout).to(dtype)
    query_scale = None
    if a.query_quant_mode == 1 and a.quant_scale_ckv is not None:
        query, query_rope, query_scale = quantized_query(query, query_rope, a.quant_scale_ckv)
    return (
        query.view(*tokens, heads, rank),
        as_rows(query_rope.view(*tokens, heads, query_rope.shape[-1])),
        as_result(query_scale, query),
        query_norm.view(*tokens, query_norm.shape[1]) if a.query_norm_flag else query_norm.new_empty(0),
        as_result(norm_scale if a.query_norm_flag else None, query),
    )


def as_rows(x: Tensor) -> Tensor:
    """Contiguous; without columns, any strides are."""
    return x.contiguous() if x.shape[-1] else x.new_empty(x.shape)


def tables(a: Prolog) -> tuple[Tensor | None, Tensor | None]:
    """cos and sin of each token, [B*S or T, Dr]."""
    *tokens, _ = a.token_x.shape
    given = (a.rope_cos, a.rope_sin)
    cos, sin = (None if table is None else table.expand(*tokens, -1).flatten(0, -2) for table in given)
    return cos, sin


def normed_query(a: Prolog) -> tuple[Tensor, Tensor | None]:
    """query_norm [B*S or T, Hcq]; in int8 with a scale per row if weight_uq_qr is int8."""
    x, dtype = a.token_x.flatten(0, -2), a.weight_uk.dtype
    if a.weight_dq is None or a.rmsnorm_gamma_cq is None:
        return rescaled(x, a.qc_qr_scale), None
    compressed = product(x, a.weight_dq, a.dequant_scale_x, a.dequant_scale_w_dq, dtype)
    normed = rescaled(unscaled_norm(a, compressed, a.rmsnorm_gamma_cq, a.rmsnorm_epsilon_cq), a.qc_qr_scale)
    if a.weight_uq_qr.dtype != torch.int8:
        return normed.to(dtype), None
    smoothed = normed if a.smooth_scales_cq is None else normed * a.smooth_scales_cq
    return quantize_rows(smoothed, inverse_first=False)


def key_rows(a: Prolog) -> tuple[Tensor, Tensor | None]:
    """The rows of kv_cache and kr_cache per token, [B, S, *] or [T, *]; packed rows leave nothing for kr_cache."""
    *tokens, _ = a.token_x.shape
    rank, dtype = a.weight_uk.shape[2], a.weight_uk.dtype
    keys = product(a.token_x.flatten(0, -2), a.weight_dkv_kr, a.dequant_scale_x, a.dequant_scale_w_dkv_kr, dtype)
    latent = rescaled(unscaled_norm(a, keys[:, :rank], a.rmsnorm_gamma_ckv, a.rmsnorm_epsilon_ckv), a.kc_scale)
    key_rope = rope(keys[:, rank:], *tables(a), a.rope_layout).to(dtype)
    if a.k_nope_clip_alpha is not None:
        packed = packed_rows(latent, key_rope, a.k_nope_clip_alpha)
        return packed.view(*tokens, packed.shape[1]), None
    kv_rows = latent.to(dtype) if a.quant_scale_ckv is None else i8_trunc(latent * a.quant_scale_ckv)
    if a.quant_scale_ckr is not None:
        key_rope = i8_trunc(to_accumulation_dtype(key_rope) * a.quant_scale_ckr)
    return kv_rows.view(*tokens, rank), key_rope.view(*tokens, key_rope.shape[1])


def unscaled_norm(a: Prolog, x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """The RMSNorm in the accumulation dtype; with gamma_after_cast, it gets rounded products."""
    x = x.to(a.weight_uk.dtype) if a.gamma_after_cast else x
    return wide_rms_norm(x, gamma, epsilon, a.gamma_after_cast)


def product(
    x: Tensor, weight: Tensor, row_scale: Tensor | None, column_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`x @ weight` rounded to `dtype`. For int8, the exact product times the scale of each row, then of each column,
    unrounded."""
    if row_scale is None or column_scale is None:
        return x @ weight
    return int_matmul(x, weight).to(accumulation_dtype(dtype)) * row_scale * column_scale


def quantized_query(query: Tensor, query_rope: Tensor, ckv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[T, N, *] with one scale [T, N, 1] per head and token."""
    integers, scale = quantize_rows(to_accumulation_dtype(query), inverse_first=False, to_int8=i8_half_round)
    rescaled_rope = to_accumulation_dtype(query_rope) * (ckv_scale / scale)
    return integers, rescaled_rope.to(query_rope.dtype), scale


def packed_rows(latent: Tensor, key_rope: Tensor, clip_alpha: Tensor) -> Tensor:
    """The bytes of each row: int8 latents, `key_rope`, one float32 scale per tile of latents."""
    tiles = latent.view(latent.shape[0], latent.shape[1] // TILE, TILE)
    bound = tiles.abs().amax(-1, keepdim=True) * clip_alpha
    scale = bound * (1 / 127)
    integers = i8_trunc(torch.minimum(tiles, bound).maximum(-bound) * scale.reciprocal()).flatten(-2)
    key = key_rope.to(stored_key(key_rope.dtype)).view(torch.int8)
    return torch.cat((integers, key, scale.squeeze(-1).float().view(torch.int8)), -1)


def token_slots(a: Prolog) -> Tensor | None:
    """The slot of each token; None if the new rows are the new cache."""
    if a.cache_index is None or "BLK" not in a.cache_mode:
        return a.cache_index
    *tokens, _ = a.token_x.shape
    block_size = a.kv_cache.shape[1]
    starts = a.cache_index * block_size
    if a.actual_seq_len is None:
        return page_slots(starts.flatten(), tokens[0], tokens[1], block_size)
    return ragged_page_slots(starts, a.actual_seq_len, tokens[0], block_size)


def as_result(scale: Tensor | None, like: Tensor) -> Tensor:
    """A scale in float32; empty in a mode without it."""
    return like.new_empty(0, dtype=torch.float32) if scale is None else scale.float()


def fake_v3(a: Prolog) -> Results:
    *tokens, _ = a.token_x.shape
    heads, _, rank = a.weight_uk.shape
    count = math.prod(tokens)
    dtype = a.weight_uk.dtype
    new, scales = a.token_x.new_empty, functools.partial(a.token_x.new_empty, dtype=torch.float32)
    return (
        new(*tokens, heads, rank, dtype=torch.int8 if a.query_quant_mode == 1 else dtype),
        new(*tokens, heads, a.weight_dkv_kr.shape[1] - rank, dtype=dtype),
        scales(count, heads, 1) if a.query_quant_mode == 1 else scales(0),
        new(*((*tokens, a.weight_uq_qr.shape[0]) if a.query_norm_flag else (0,)), dtype=a.weight_uq_qr.dtype),
        scales(count, 1) if a.query_norm_flag and a.weight_quant_mode else scales(0),
        like_store(a.kv_cache, a.cache_index),
        torch.empty_like(a.kr_cache) if a.k_nope_clip_alpha is not None else like_store(a.kr_cache, a.cache_index),
    )


mla_prolog_v3 = define(
    "mla_prolog_v3",
    V3Arguments,
    body_v3,
    returns=("query", "query_rope", "dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm", *CACHES),
    check=check_v3,
    fake=fake_v3,
    samples=samples_v3,
    in_place=body_v3_,
    writes=CACHES,
    lengths=("actual_seq_len",),
)


# --- mla_prolog ------------------------------------------------------------------------------------------------------


def body(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The absorbed query of MLA, and the caches with this step's latents::

        n          = RMSNorm(token_x @ weight_dq) * qc_qr_scale      (token_x * qc_qr_scale without weight_dq)
        u          = n @ weight_uq_qr
        query      = u[nope of head n] @ weight_uk[n]
        query_rope = RoPE(u[rope of head n])
        k          = token_x @ weight_dkv_kr
        kv_cache[cache_index] = RMSNorm(k[:Hckv]) * kc_scale;  kr_cache[cache_index] = RoPE(k[Hckv:])

    token_x is [B, S, He] or [T, He]; weight_dq [He, Hcq] or None, together with rmsnorm_gamma_cq [Hcq]; weight_uq_qr
    [Hcq, N*(D+Dr)], for each head D nope then Dr rope columns; weight_uk [N, D, Hckv]; weight_dkv_kr [He, Hckv+Dr];
    rmsnorm_gamma_ckv [Hckv]; rope_sin and rope_cos [B or 1, S, Dr] or [T, Dr], both None for a model without rotation.
    Without a rotary part, Dr is 0: query_rope and kr_cache have no columns.
    Strides are free. Tensors share the dtype of token_x (bfloat16, float16, float32, float64); gammas and tables may be
    any of these. Matmuls round to it; RMSNorm runs in float32, or float64 for float64, with rmsnorm_epsilon_cq and
    rmsnorm_epsilon_ckv under its root.

    cache_mode defines the caches [..., Hckv] and [..., Dr] and the int64 cache_index: "PA_BSND" [BlockNum, BlockSize,
    1, *], index [B, S] or [T] over the BlockNum*BlockSize slots; "PA_NZ" the same; a page has the bytes of [*/n0,
    BlockSize, n0], where n0 elements take 32 bytes; BlockSize is a multiple of 16 up to 1024, n0 divides the widths,
    only axis 0 may have gaps; "NZ" the same with caches of that shape, [BlockNum, */n0, BlockSize, n0]; "Norm" [B, 1,
    T, *], index [B or 1, S] of positions inside the batch row; "BSND" [B, S, 1, *] and "TND" [T, 1, *], no index: the
    new rows in token order are the new cache. A negative index stores nothing for its token. Duplicate slots: which row
    is stored is undefined. For a row that the program refuses to write, the compiler gives the number of slots, which
    is refused here, too, or -1 on NPUs.

    rope_layout is (layout read)_(layout written), "interleave_half", "half_half" or "interleave_interleave".
    gamma_after_cast multiplies by gamma after rounding the normalised value, as Hugging Face does. qc_qr_scale and
    kc_scale, which LongCat has, are those of `mla_prolog_v3`.

    An int8 weight_uq_qr means weight_quant_mode 1 of `mla_prolog_v3`, with dequant_scale_w_uq_qr and perhaps
    smooth_scales_cq; int8 caches then mean its kv_cache_quant_mode 2, with quant_scale_ckv and quant_scale_ckr. Shapes
    and roundings are those of `mla_prolog_v3`, which has no "Norm", no other rope_layout and no gamma_after_cast, and
    needs weight_dq, rmsnorm_gamma_cq and both tables. The page of npu_mla_prolog calls all seven scales reserved, but
    its kernel reads these four, hence a UserWarning; dequant_scale_x, dequant_scale_w_dq and dequant_scale_w_dkv_kr are
    refused: `mla_prolog_v3` has the mode for them.

    Returns query [B, S, N, Hckv], query_rope [B, S, N, Dr] (or [T, N, *]), kv_cache_out, kr_cache_out; in place
    `mla_prolog_` writes the caches instead and returns the first two, for the vendor's kernel writes them although its
    schema says otherwise. Raises ValueError for arguments that do not fit; index values are checked on the CPU only,
    unless within `check_values`. Inference only.

    Source: torch_npu.npu_mla_prolog. Its page wants token_x [B, S, He] with S up to 16, and PyTorch 2.1 for graphs; the
    kernel takes any S and [T, He], and here any PyTorch will do.
    """
    query, query_rope, *_, kv_cache, kr_cache = body_v3(as_v3(a))
    return query, query_rope, kv_cache, kr_cache


def fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, *_, kv_cache, kr_cache = fake_v3(as_v3(a))
    return query, query_rope, kv_cache, kr_cache


mla_prolog = define(
    "mla_prolog",
    Arguments,
    body,
    returns=("query", "query_rope", *CACHES),
    check=check,
    fake=fake,
    samples=samples,
    in_place=lambda a: body_v3_(as_v3(a))[:2],
    writes=CACHES,
)
