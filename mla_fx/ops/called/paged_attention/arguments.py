"""The arguments of paged_attention."""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None = None
    # Required nevertheless: in the document's order, value_cache, which is optional, comes before them.
    block_tables: Tensor = None  # type: ignore[assignment]  # None is refused by name, as for every required tensor
    context_lens: Tensor = None  # type: ignore[assignment]
    mask: Tensor | None = None
    batch_run_status: Tensor | None = None
    k_descale: Tensor | None = None
    k_offset: Tensor | None = None
    v_descale: Tensor | None = None
    v_offset: Tensor | None = None
    q_seq_lens: Tensor | None = None
    razor_offset: Tensor | None = None
    p_scale: Tensor | None = None
    log_n: Tensor | None = None
    _: KW_ONLY
    head_num: int = 0
    kv_head_num: int = 0
    qk_scale: float = 1.0
    q_scale: float = 1.0
    mask_type: str = "undefined"
    batch_run_status_enable: bool = False
    quant_type: str = "type_quant_undefined"
    out_data_type: torch.dtype | None = None
    has_quant_offset: bool = False
    compress_type: str = "compress_type_undefined"
    calc_type: str = "calc_type_undefined"
    scale_type: str = "scale_type_tor"
    input_layout: str = "type_bsnd"
    mla_v_head_size: int = 0
