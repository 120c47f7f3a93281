"""The arguments of multi_latent_attention, and what its enumerators and its query say about a call."""

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.called.enumerators import enumerator
from mla_fx.ops.common.sizes import statically_known_true

RANK, ROPE = 512, 64

NO_MASK, SPEC_MASK, FREE_MASK = "undefined", "mask_type_spec", "mask_type_free"
DECODE, SPEC, RING = "calc_type_undefined", "calc_type_spec", "calc_type_ring"
MERGED, SPLIT, INT8, NZ = "kvcache", "krope_ctkv", "int8_nzcache", "nzcache"


@dataclass(frozen=True)
class Arguments:
    q_nope: Tensor
    q_rope: Tensor | None
    ctkv: Tensor
    k_rope: Tensor | None
    block_tables: Tensor
    context_lens: Tensor
    mask: Tensor | None = None
    q_seqlen: Tensor | None = None
    qk_descale: Tensor | None = None
    pv_descale: Tensor | None = None
    _: KW_ONLY
    head_num: int = 0
    qk_scale: float = 1.0
    kv_head_num: int = 1
    mask_type: str = NO_MASK
    calc_type: str = DECODE
    cache_mode: str = SPLIT


class Modes(NamedTuple):
    mask: str
    calc: str
    cache: str


class Result(NamedTuple):
    letters: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def modes(a: Arguments) -> Modes:
    """The three enumerators as torch_npu spells them."""
    masks, second_name = (NO_MASK, SPEC_MASK, FREE_MASK), {"mask_type_mask_free": FREE_MASK}
    return Modes(
        enumerator("mask_type", a.mask_type, "mask_type_", masks, second_name),
        enumerator("calc_type", a.calc_type, "calc_type_", (DECODE, SPEC, RING)),
        enumerator("cache_mode", a.cache_mode, "", (MERGED, SPLIT, INT8, NZ)),
    )


def is_causal(q_nope: Tensor) -> bool:
    """Whether the kernel hides later keys from the rows of a sequence by itself, and reads no mask."""
    return q_nope.dtype == torch.int8 or statically_known_true(q_nope.shape[1] == 128)


def results(a: Arguments, mode: Modes) -> tuple[Result, Result]:
    """The axes, shape and dtype of atten_out and of lse."""
    rows, heads, _ = a.q_nope.shape
    dtype = (a.q_nope if a.q_rope is None else a.q_rope).dtype
    lse_dtype = torch.float32 if mode.cache == INT8 else dtype
    lse = Result("T, H, 1", (rows, heads, 1), lse_dtype) if mode.calc == RING else Result("empty", (0,), lse_dtype)
    return Result("T, H, Hckv", (rows, heads, RANK), dtype), lse
