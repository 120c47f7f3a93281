"""Lowers attention to FusedInferAttentionScore, of latents (latents.py) or of heads (heads.py), and to
SparseFlashAttention over chosen keys (sparse_flash_attention.py)."""

from __future__ import annotations

from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.target import Compiled

from ...limits import Surface
from . import heads, latents

OPERATOR = "attention"


def lower(surface: Surface, a: Arguments) -> Compiled:
    return latents.lower(surface, a) if a.weight_uk is None else heads.lower(surface, a)


def refuse_body(a: Arguments) -> None:
    (latents if a.weight_uk is None else heads).refuse_body(a)
