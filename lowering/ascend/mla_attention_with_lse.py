"""Lowers mla_attention.with_lse to FusedInferAttentionScore, which then returns the logarithms of its sums."""

from __future__ import annotations

from torch import Tensor

from mla_fx.ops.emitted.mla_attention import Arguments
from mla_fx.target import Compiled

from . import mla_attention
from .latent_attention_with_lse import logarithms
from .surface import Surface

OPERATOR = "mla_attention.with_lse"
refuse_body = mla_attention.refuse_body


def lower(surface: Surface, a: Arguments) -> Compiled:
    mla_attention.lower(surface, a)  # or it raises NoMatch
    return attention


def attention(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    """[B,S,N,128] and [B,S,N]."""
    out, lse = mla_attention.attend(surface, a, return_softmax_lse=True)
    return out, logarithms(a, lse, mla_attention.lengths(a))
