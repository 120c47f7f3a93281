"""What the processor can do."""

import functools

import torch


@functools.cache
def multiplies_tiles() -> bool:
    """Whether the CPU multiplies tiles of bfloat16 (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())
