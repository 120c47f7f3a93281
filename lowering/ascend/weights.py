"""Lays weights out in the form that the vendor's kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from .surface import Surface

FRACTAL_NZ = 29


def in_fractals(surface: Surface, weight: Tensor) -> Tensor:
    """A weight in FRACTAL_NZ if the cast is hoisted and costs nothing. Otherwise the user must have cast it.

    `torch.ops.npu.npu_format_cast` is the same operator, but without a fake kernel, so it cannot be traced.
    """
    weight = weight.contiguous()
    if not surface.hoists:
        return weight
    cast: Tensor = torch.ops.npu._npu_format_cast(weight, FRACTAL_NZ)
    return cast


def halves_interleaved(weight: Tensor, width: int) -> Tensor:
    """Reorder the last `width` columns of each row: column i of one half becomes adjacent to column i of the other.

    A kernel that rotates adjacent columns then rotates the original halves."""
    kept, rotated = weight[..., :-width], weight[..., -width:]
    pairs = rotated.reshape(*weight.shape[:-1], 2, width // 2).transpose(-1, -2).flatten(-2)
    return torch.cat((kept, pairs), -1)
