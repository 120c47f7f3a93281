"""Lowers latent_attention.with_lse to FusedInferAttentionScore, which then returns the logarithms of its sums."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments
from mla_fx.ops.emitted.mla_attention import Arguments as MlaArguments
from mla_fx.ops.emitted.pages import context_of
from mla_fx.target import Compiled

from . import fused_infer_attention_score as kernel
from . import latent_attention
from .causal_masks import checked
from .surface import Surface

OPERATOR = "latent_attention.with_lse"
refuse_body = latent_attention.refuse_body


def lower(surface: Surface, a: Arguments) -> Compiled:
    latent_attention.lower(surface, a)  # or it raises NoMatch
    return attention


def attention(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    """[B,S,N,512] and [B,S,N]."""
    out, lse = latent_attention.attend(surface, a, return_softmax_lse=True)
    return out, logarithms(a, lse.transpose(1, 2), kernel.lengths(a))  # of the kernel, [B,N,S,1]


def logarithms(a: Arguments | MlaArguments, lse: Tensor, lengths: Tensor | None) -> Tensor:
    """The kernel's, [B,S,N,1] as [B,S,N], for the lengths that it got. Plus infinity marks a row that sees no key."""
    lse = torch.where(lse == torch.inf, of_hidden_scores(a, lse), lse)
    return checked(lse, a.mask, lengths).squeeze(-1)


def of_hidden_scores(a: Arguments | MlaArguments, lse: Tensor) -> Tensor | float:
    """Return the log-sum-exp of a row in which all scores are hidden."""
    if a.fill is None:
        return -torch.inf
    scores = max(a.fill, torch.finfo(lse.dtype).min)
    return torch.full((), context_of(a.kv_cache, a.block_table), dtype=lse.dtype, device=lse.device).log() + scores
