"""Products of bfloat16 where a library multiplies only float32 fast: the numbers of a weight are widened in parts."""

import torch
from torch import Tensor

from mla_fx.ops.common import machine

PART = 2**20  # numbers of a weight at a time; measured: four times as many take as long
ROWS = 1024  # at a time: a prompt is not copied whole


def are_faster(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and not machine.multiplies_bfloat16()


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """[M, K] @ [K, N] or [B, M, K] @ [B, K, N], rounded once."""
    if not are_faster(rows.dtype):
        return rows @ weight
    out = rows.new_empty((*rows.shape[:-1], weight.shape[-1]))
    columns = max(1, PART // max(1, weight[..., :1].numel()))
    for some, of_some in zip(torch.split(rows, ROWS, -2), torch.split(out, ROWS, -2), strict=True):
        wide = some.float()
        for part, to in zip(torch.split(weight, columns, -1), torch.split(of_some, columns, -1), strict=True):
            to.copy_(wide @ part.float())
    return out
