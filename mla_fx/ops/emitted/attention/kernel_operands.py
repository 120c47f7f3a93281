"""The operands of attention over latents and of lightning_index as kernels take them: addresses with strides, for CPUs
and other devices alike. Letters are those of the operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.emitted import lightning_index

from .arguments import Arguments
from .codes import dtype_of, of_rows
from .pages import context_of
from .softmax import aligned, fake_sums


def in_rows(value: Tensor | None) -> Any:
    """A tensor whose rows are in one piece of memory."""
    return value if value is None or value.stride(-1) == 1 else value.contiguous()


def lengths_of(a: Arguments) -> Tensor | None:
    """context_lens as [B]; with is_causal, what means the same."""
    batch, steps = a.query.shape[:2]
    lengths = a.query.new_full((1,), steps, dtype=torch.int64) if a.is_causal else a.context_lens
    return None if lengths is None else lengths.expand(batch)


def mask_of(a: Arguments) -> Tensor | None:
    """[B, N, S, T] in bool or float32."""
    if a.mask is None:
        return None
    batch, steps, heads, _ = a.query.shape
    mask = a.mask if a.mask.dtype == torch.bool else a.mask.float()
    return mask.expand(batch, heads, steps, context_of(a.kv_cache, a.block_table))


def scales_of(scales: Tensor | None, cache: Tensor | None) -> Tensor | None:
    """The scales of each row of codes, in float32."""
    return None if scales is None or cache is None else of_rows(in_rows(scales.float()), cache)


def tile_of(scales: Tensor | None, cache: Tensor | None) -> int:
    """The columns that share a scale; 0 without scales."""
    return 0 if scales is None or cache is None else cache.shape[-1] // scales.shape[-1]


def strides(value: Tensor | None, count: int) -> Sequence[int]:
    """The first strides; zeros without a tensor."""
    return (0,) * count if value is None else value.stride()[:count]


def results(a: Arguments, return_lse: bool = True) -> tuple[Tensor, Tensor]:
    """Room for attention, in the dtype of the caches' numbers, and for the logarithms."""
    return a.query.new_empty(a.query.shape, dtype=dtype_of(a)), fake_sums(a.query, return_lse)


def asked(a: Arguments) -> tuple[Tensor, Tensor]:
    """Room for what a call returns."""
    return results(a, a.return_lse)


def of_index(a: lightning_index.Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Query, key, weights times the scale in float32, block_table, and mask [B, S, 1, T] in bool or float32. Lengths
    are a mask."""
    batch, steps = a.query.shape[:2]
    weights = (a.weights.float() * a.scale).contiguous()
    mask = None if a.mask is None else a.mask if a.mask.dtype == torch.bool else a.mask.float()
    sizes = batch, steps, 1, context_of(a.key, a.block_table)
    shown = None if mask is None else aligned(mask, rows_first=True).expand(sizes)
    return in_rows(a.query), in_rows(a.key), weights, in_rows(a.block_table), shown
