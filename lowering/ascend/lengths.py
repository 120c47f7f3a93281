"""Lengths of sequences, which a call has as a tensor or as numbers that a kernel takes from the host.

A captured graph replays what it once computed, and torchair updates only numbers that are graph inputs. So numbers that
the graph computes are read before it runs (see `mla_fx.passes.hoist`), all of them in one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_fx.graph.torch_private import detect_fake_mode, unknown_number

from .surface import Surface

Lengths = Tensor | Sequence[int]
READ = frozenset({"host_number"})


@torch.library.custom_op("mla_fx_ascend::host_number", mutates_args=())
def host_number(values: Tensor, position: int) -> int:
    """One element of a tensor of whole numbers."""
    return int(values[position])


@host_number.register_fake
def _(values: Tensor, position: int) -> int:
    return unknown_number(detect_fake_mode([values]))  # type: ignore[no-any-return]


def on_host(surface: Surface, lengths: Lengths) -> Lengths:
    """The lengths as numbers for the host, if the surface has such, and their count is known."""
    if not isinstance(lengths, Tensor) or not surface.reads_ahead or not isinstance(lengths.shape[0], int):
        return lengths
    values = lengths.to(torch.int64)
    return [torch.ops.mla_fx_ascend.host_number(values, position) for position in range(lengths.shape[0])]


def as_tensor(lengths: Lengths, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The lengths as a tensor. Host numbers become part of the graph."""
    if isinstance(lengths, Tensor):
        return lengths.to(dtype)
    return torch.cat([torch.full((1,), length, dtype=dtype, device=device) for length in lengths])
