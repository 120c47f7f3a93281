"""The chip, kind of graph and interfaces that a lowering may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# Prefixes of CANN's chip names, as returned by `torch.npu.get_device_name()`.
A2, A3, A5 = "Ascend910B", "Ascend910_93", "Ascend950"

Prolog = Literal["v1", "v2", "v3"]
Release = Literal["8.5.0.alpha001", "8.5.0", "9.0.0", "9.1.0"]
RELEASES: tuple[Release, ...] = get_args(Release)  # of CANN, those whose limits are known, the oldest first


@dataclass(frozen=True)
class Surface:
    """One chip, and the kind of graph that is compiled for it."""

    chip: str
    mode: Literal["ge", "aclgraph"]
    hoists: bool
    """Whether values that depend only on weights are computed once. A new layout of a weight then costs nothing."""
    cann: Release
    """The release whose limits a call is checked against."""
    reads_ahead: bool = False
    """Whether the host reads lengths that the graph computes before it runs. Kernels then get them as numbers."""
    sinks_tiling: bool = False
    """Whether the device chooses how kernels tile (torchair's `tiling_schedule_optimize`)."""
    trusts_masks: bool = False
    """Whether the user asserts that every mask is causal."""
    prolog: Prolog = "v3"
    """The interface of the vendor's prolog."""
