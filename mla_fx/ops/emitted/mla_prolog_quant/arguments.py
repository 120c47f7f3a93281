"""The arguments of mla_prolog_quant; the docstring of its body explains them."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from mla_fx.ops.common.sizes import statically_known_true

ROPE_LAYOUT = "interleave_half"
KEY_TILES = 4


@dataclass(frozen=True)
class Arguments:
    token_x: Tensor
    w_dq: Tensor
    w_uq_qr: Tensor
    dequant_scale: Tensor
    w_uk: Tensor
    w_dkv_kr: Tensor
    gamma_cq: Tensor
    gamma_ckv: Tensor
    cos: Tensor
    sin: Tensor
    cache_index: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    k_scale_cache: Tensor
    smooth_scales_cq: Tensor | None = None
    dequant_scale_w_dq: Tensor | None = None
    dequant_scale_w_dkv_kr: Tensor | None = None
    _: KW_ONLY
    epsilon_cq: float = 1e-5
    epsilon_ckv: float = 1e-5
    cache_mode: str = "PA_BSND"
    is_symmetry: bool = True

    @property
    def quantises_query(self) -> bool:
        """Whether the normalised query is quantised to int8; the key cache is int8, too, then."""
        return self.dequant_scale.dim() == 0 or not statically_known_true(self.dequant_scale.shape[0] == 0)
