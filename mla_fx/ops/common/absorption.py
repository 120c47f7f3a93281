"""Absorption: the up-projections of latents, applied to the query and to the result of attention instead.

    q . (W_uk c) = (W_uk^T q) . c,    sum_t p_t (W_uv c_t) = W_uv (sum_t p_t c_t)
"""

import torch
from torch import Tensor


def absorb_query(q_nope: Tensor, weight_uk: Tensor) -> Tensor:
    """[B,S,N,D], [N,D,Hckv] -> [B,S,N,Hckv]."""
    return _per_head(q_nope, weight_uk)


def expand_output(out: Tensor, weight_uv: Tensor) -> Tensor:
    """[B,S,N,Hckv], [N,Dv,Hckv] -> [B,S,N,Dv]."""
    return _per_head(out, weight_uv.permute(0, 2, 1)).contiguous()


def _per_head(value: Tensor, weight: Tensor) -> Tensor:
    """[B,S,N,I], [N,I,O] -> [B,S,N,O]."""
    batch, tokens, heads, width = value.shape
    by_head = value.permute(2, 0, 1, 3).reshape(heads, batch * tokens, width)
    return torch.bmm(by_head, weight).reshape(heads, batch, tokens, weight.shape[2]).permute(1, 2, 0, 3)
