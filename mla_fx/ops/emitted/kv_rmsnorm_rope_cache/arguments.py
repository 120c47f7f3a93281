"""The arguments of kv_rmsnorm_rope_cache; the docstring of its body explains them."""

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(frozen=True)
class Arguments:
    kv: Tensor
    gamma: Tensor
    cos: Tensor | None
    sin: Tensor | None
    index: Tensor | None
    k_cache: Tensor
    ckv_cache: Tensor
    k_rope_scale: Tensor | None = None
    c_kv_scale: Tensor | None = None
    k_rope_offset: Tensor | None = None
    c_kv_offset: Tensor | None = None
    v: Tensor | None = None
    _: KW_ONLY
    epsilon: float = 1e-5
    cache_mode: str = "Norm"
    is_output_kv: bool = False
    rope_layout: str = "interleave_half"
    gamma_after_cast: bool = False
    kc_scale: float = 1.0
    rounds_first: bool = False
