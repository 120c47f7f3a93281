"""The arguments of mla_prolog and of mla_prolog_v3; the docstrings of their bodies explain them."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

TILE = 128  # latents that share one scale in a packed row


def stored_key(dtype: torch.dtype) -> torch.dtype:
    """The dtype of rotary keys in packed rows: 16 bits, or float32 for float64."""
    return torch.float32 if dtype == torch.float64 else dtype


@dataclass(frozen=True)
class Prolog:
    """What both prologs compute from: mla_prolog also serves models without a low-rank query, or without rotation."""

    token_x: Tensor
    weight_dq: Tensor | None
    weight_uq_qr: Tensor
    weight_uk: Tensor
    weight_dkv_kr: Tensor
    rmsnorm_gamma_cq: Tensor | None
    rmsnorm_gamma_ckv: Tensor
    rope_sin: Tensor | None
    rope_cos: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor
    cache_index: Tensor | None = None
    dequant_scale_x: Tensor | None = None
    dequant_scale_w_dq: Tensor | None = None
    dequant_scale_w_uq_qr: Tensor | None = None
    dequant_scale_w_dkv_kr: Tensor | None = None
    quant_scale_ckv: Tensor | None = None
    quant_scale_ckr: Tensor | None = None
    smooth_scales_cq: Tensor | None = None
    actual_seq_len: Tensor | None = None
    k_nope_clip_alpha: Tensor | None = None
    _: KW_ONLY
    rmsnorm_epsilon_cq: float = 1e-5
    rmsnorm_epsilon_ckv: float = 1e-5
    cache_mode: str = "PA_BSND"
    query_norm_flag: bool = False
    weight_quant_mode: int = 0
    kv_cache_quant_mode: int = 0
    query_quant_mode: int = 0
    ckvkr_repo_mode: int = 0
    quant_scale_repo_mode: int = 0
    tile_size: int = TILE
    qc_qr_scale: float = 1.0
    kc_scale: float = 1.0
    rope_layout: str = "interleave_half"
    gamma_after_cast: bool = False


@dataclass(frozen=True)
class V3Arguments(Prolog):
    weight_dq: Tensor
    rmsnorm_gamma_cq: Tensor
    rope_sin: Tensor
    rope_cos: Tensor


@dataclass(frozen=True)
class Arguments:
    token_x: Tensor
    weight_dq: Tensor | None
    weight_uq_qr: Tensor
    weight_uk: Tensor
    weight_dkv_kr: Tensor
    rmsnorm_gamma_cq: Tensor | None
    rmsnorm_gamma_ckv: Tensor
    rope_sin: Tensor | None
    rope_cos: Tensor | None
    cache_index: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor
    dequant_scale_x: Tensor | None = None
    dequant_scale_w_dq: Tensor | None = None
    dequant_scale_w_uq_qr: Tensor | None = None
    dequant_scale_w_dkv_kr: Tensor | None = None
    quant_scale_ckv: Tensor | None = None
    quant_scale_ckr: Tensor | None = None
    smooth_scales_cq: Tensor | None = None
    _: KW_ONLY
    rmsnorm_epsilon_cq: float = 1e-5
    rmsnorm_epsilon_ckv: float = 1e-5
    cache_mode: str = "PA_BSND"
    rope_layout: str = "interleave_half"
    gamma_after_cast: bool = False
    qc_qr_scale: float = 1.0
    kc_scale: float = 1.0
