"""What the processor can do, and what is on it."""

import functools

import torch
from torch import Tensor


def is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether PyTorch's library multiplies bfloat16 on the CPU (AVX512): on those with AVX2 alone, its own loops take
    several times as long as float32 does. True on others, which were not measured."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return not _has("avx2", if_unknown=False) or (asked is not None and bool(asked()))


def multiplies_pairs() -> bool:
    """Whether the CPU multiplies pairs of bfloat16 (AVX512_BF16)."""
    return _has("avx512_bf16", if_unknown=False)


def multiplies_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (AMX); True where torch cannot say."""
    return _has("amx_bf16", if_unknown=True)


@functools.cache
def _has(capability: str, *, if_unknown: bool) -> bool:
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return if_unknown if capabilities is None else bool(capabilities().get(capability))
