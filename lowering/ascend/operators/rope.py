"""Lowers rope to torch_npu.npu_interleave_rope or npu_rotary_mul (InterleaveRope and RotaryMul in graphs)."""

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.rope import Arguments
from mla_fx.target import Compiled

from .. import limits
from ..limits import A2, A3, Surface

OPERATOR = "rope"
KERNELS = {"interleave_half": "InterleaveRope", "half_half": "RotaryMul"}


def lower(surface: Surface, a: Arguments) -> Compiled:
    kernel = KERNELS.get(a.rope_layout)
    if kernel is None:
        raise NoMatch(f"rope_layout is {a.rope_layout!r}; {' and '.join(KERNELS.values())} write halves")
    limits.chip(surface, kernel, (A2, A3))
    limits.dtype("x", a.x, kernel, limits.HALVES)
    limits.size("x has Dr", a.x.shape[-1], kernel, (64,))
    return plain


def plain(surface: Surface, a: Arguments) -> Tensor:
    """The result of `mla_fx.rope`.

    InterleaveRope has the heads before the tokens, so each token is passed as a separate sequence."""
    batch, steps, heads, width = a.x.shape
    cos, sin = (for_each_token(table, batch) for table in (a.cos, a.sin))
    if a.rope_layout == "half_half":
        rotated: Tensor = torch.ops.npu.npu_rotary_mul(a.x.contiguous(), cos, sin)
        return rotated
    x, *tables = (tensor.reshape(batch * steps, -1, 1, width) for tensor in (a.x, cos, sin))
    rotated = torch.ops.npu.npu_interleave_rope(x, *tables)
    return rotated.view(batch, steps, heads, width)


def for_each_token(table: Tensor, batch: int) -> Tensor:
    """[B or 1, S, Dr] as [B, S, 1, Dr]."""
    return table.unsqueeze(2).expand(batch, -1, -1, -1).contiguous()
