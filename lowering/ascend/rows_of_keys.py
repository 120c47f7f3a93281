"""Keys and lengths as LightningIndexer and SparseFlashAttention take them: rows [B, T, 1, D] or pages of them.

Both have lengths as tensors on the device, so that a captured graph reads them at each replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.emitted.pages import context_of

from .operators.latent_attention import from_start

PAGES = range(16, 1025, 16)
ALL, RIGHT_DOWN = 0, 3  # the sparse modes in which a row sees all keys, or one less than the row after it


def key_lengths(a: Any, cache: Tensor) -> tuple[Tensor | None, int]:
    """The number of keys that the last row of each sequence sees, int32 [B], and the sparse mode. None means all."""
    batch, context = a.query.shape[0], context_of(cache, a.block_table)
    if a.context_lens is not None:
        return a.context_lens.clamp(0, context).expand(batch).to(torch.int32), RIGHT_DOWN
    if a.block_table is None:
        return None, ALL
    return torch.full((batch,), context, dtype=torch.int32, device=cache.device), ALL


def keys_of(cache: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows or pages with an axis for the only head, and the table with every block counted from the start."""
    keys = cache.contiguous().unsqueeze(2)
    if block_table is None:
        return keys, None
    return keys, from_start(block_table, cache.shape[0]).to(torch.int32)
