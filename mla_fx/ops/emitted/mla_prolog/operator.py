"""mla_prolog: everything of one MLA layer from the hidden states to the attention, cache write included."""

from torch import Tensor

from mla_fx.ops.common.define import define
from mla_fx.ops.emitted.mla_prolog_v3 import operator as v3

from .arguments import Arguments
from .check import as_v3, check
from .samples import samples


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
    query, query_rope, *_, kv_cache, kr_cache = v3.body(as_v3(a))
    return query, query_rope, kv_cache, kr_cache


def body_(a: Arguments) -> tuple[Tensor, Tensor]:
    query, query_rope, *_ = v3.body_(as_v3(a))
    return query, query_rope


def fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, *_, kv_cache, kr_cache = v3.fake(as_v3(a))
    return query, query_rope, kv_cache, kr_cache


operator = define(
    "mla_prolog",
    Arguments,
    body,
    returns=("query", "query_rope", *v3.CACHES),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes=v3.CACHES,
)
