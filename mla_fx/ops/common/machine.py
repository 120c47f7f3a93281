"""What the processor can do."""

import functools

import torch


@functools.cache
def multiplies_pairs() -> bool:
    """Whether the CPU multiplies pairs of bfloat16 (AVX512_BF16)."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is not None and bool(capabilities().get("avx512_bf16"))


@functools.cache
def multiplies_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (AMX); True where torch cannot say."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is None or bool(capabilities().get("amx_bf16"))
