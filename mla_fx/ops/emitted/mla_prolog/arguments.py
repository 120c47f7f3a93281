"""The arguments of mla_prolog; the docstring of its body explains them."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


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
