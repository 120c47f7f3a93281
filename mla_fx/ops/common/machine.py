"""What the processor can do."""

import functools

import torch


@functools.cache
def multiplies_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (AMX); True where torch cannot say."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    return capabilities is None or bool(capabilities().get("amx_bf16"))
