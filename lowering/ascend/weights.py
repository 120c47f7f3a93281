"""Weights as the vendor's kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from .surface import Surface

FRACTAL_NZ = 29


def in_fractals(surface: Surface, weight: Tensor) -> Tensor:
    """A weight in FRACTAL_NZ where that costs nothing; elsewhere it is for the user to have cast it.

    `torch.ops.npu.npu_format_cast` is this operator under a name that has no fake kernel: it cannot be traced.
    """
    weight = weight.contiguous()
    if not surface.hoists:
        return weight
    cast: Tensor = torch.ops.npu._npu_format_cast(weight, FRACTAL_NZ)
    return cast


def halves_interleaved(weight: Tensor, width: int) -> Tensor:
    """The last `width` columns of each row reordered: column i of one half becomes neighbour of that of the other.

    A kernel that rotates neighbours then rotates what were halves."""
    kept, rotated = weight[..., :-width], weight[..., -width:]
    pairs = rotated.reshape(*weight.shape[:-1], 2, width // 2).transpose(-1, -2).flatten(-2)
    return torch.cat((kept, pairs), -1)
