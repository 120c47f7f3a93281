"""Lengths of sequences, which a call has as a tensor or as host numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lengths = Tensor | Sequence[int]


def as_tensor(lengths: Lengths, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lengths as a tensor. Host numbers become part of the graph."""
    if isinstance(lengths, Tensor):
        return lengths.to(dtype)
    return torch.cat([torch.full((1,), length, dtype=dtype, device=device) for length in lengths])
