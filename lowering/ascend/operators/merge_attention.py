"""Lowers merge_attention to torch_npu.npu_attention_update (AttentionUpdate in graphs).

The source is op-plugin's document of that operator (August 2026)."""

import functools

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.merge_attention import Arguments
from mla_fx.target import Compiled

from .. import limits
from ..limits import A2, A3, Surface

OPERATOR = "merge_attention"
KERNEL = "AttentionUpdate"

WIDTHS = range(8, 513, 8)
RETURNS_LSE = 1  # update_type


def lower(surface: Surface, a: Arguments) -> Compiled:
    limits.chip(surface, KERNEL, (A2, A3))
    limits.dtype("outs[0]", a.outs[0], KERNEL, (*limits.HALVES, torch.float32))
    width = a.outs[0].shape[-1]
    if width not in WIDTHS:
        raise NoMatch(f"outs have C = {width}; {KERNEL} takes multiples of 8 up to 512")
    if statically_known_true(a.lses[0].numel() == 0):
        raise NoMatch(f"outs have no rows; {KERNEL} takes 1 or more")
    return plain


def plain(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    """The results of `mla_fx.merge_attention`. The kernel divides zero by zero in rows that no part sees."""
    shape = a.outs[0].shape
    lses = [lse.reshape(-1) for lse in a.lses]
    outs = [out.reshape(-1, shape[-1]) for out in a.outs]
    out, lse = torch.ops.npu.npu_attention_update(lses, outs, RETURNS_LSE)
    is_empty = functools.reduce(torch.maximum, lses) == -torch.inf
    out = torch.where(is_empty.unsqueeze(-1), 0.0, out)
    return out.view(shape), torch.where(is_empty, -torch.inf, lse).view(shape[:-1])
