"""mla_prolog: everything of one MLA layer from the hidden states to the attention, cache write included."""

from torch import Tensor

from mla_fx.ops.common.define import define
from mla_fx.ops.emitted.mla_prolog_v3 import operator as v3

from .arguments import Arguments
from .check import as_v3, check
from .samples import samples


def body(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The absorbed query of MLA, and the caches with this step's latents: `mla_prolog_v3` without its newer modes, for
    more models and caches. Arguments of one name are the same in both; they compute the same and round alike.

    weight_dq and rmsnorm_gamma_cq may be None, both: n is token_x * qc_qr_scale then. rope_sin and rope_cos may be
    [1, S, Dr] for all sequences, or None, both, for a model without rotation. Without a rotary part, Dr is 0:
    query_rope and kr_cache have no columns. Strides of weights are free. Tensors share the dtype of token_x.

    cache_mode is one of "PA_BSND", "PA_NZ", "BSND", "TND" and "Norm" of `mla_prolog_v3`, where pages of "PA_BSND" may
    have any BlockSize, or "NZ": "PA_NZ" with caches of the shape of their bytes, [BlockNum, */n0, BlockSize, n0]. For a
    row that the program refuses to write, the compiler gives the number of slots, which is refused here, too, or -1 on
    NPUs.

    An int8 weight_uq_qr means weight_quant_mode 1 of `mla_prolog_v3`, with dequant_scale_w_uq_qr and perhaps
    smooth_scales_cq; int8 caches then mean its kv_cache_quant_mode 2, with quant_scale_ckv and quant_scale_ckr. It has
    no "Norm" or "NZ", no rope_layout but "interleave_half" and no gamma_after_cast, and needs weight_dq,
    rmsnorm_gamma_cq and both tables. The page of npu_mla_prolog calls all seven scales reserved, but its kernel reads
    these four, hence a UserWarning; dequant_scale_x, dequant_scale_w_dq and dequant_scale_w_dkv_kr are refused:
    `mla_prolog_v3` has the mode for them.

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
