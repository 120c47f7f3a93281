"""Lowers rms_norm to torch_npu.npu_rms_norm (RmsNorm in graphs)."""

import torch
from torch import Tensor

from mla_fx.ops.emitted.rms_norm import Arguments
from mla_fx.target import Compiled

from .. import limits
from ..limits import A2, A3, A5, Surface

OPERATOR = "rms_norm"
KERNEL = "RmsNorm"

DTYPES = (*limits.HALVES, torch.float32)


def lower(surface: Surface, a: Arguments) -> Compiled:
    limits.chip(surface, KERNEL, (A2, A3, A5))
    limits.dtype("x", a.x, KERNEL, DTYPES)
    return plain


def plain(surface: Surface, a: Arguments) -> Tensor:
    """The result of `mla_fx.rms_norm`.

    The kernel multiplies by gamma before it rounds, regardless of `gamma_after_cast`. This is one rounding less."""
    normed: Tensor = torch.ops.npu.npu_rms_norm(a.x.contiguous(), a.gamma.contiguous(), a.epsilon)[0]
    return normed
