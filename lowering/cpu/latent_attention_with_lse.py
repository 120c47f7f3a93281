"""Lowers latent_attention.with_lse to attention_over_rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from .attention_over_rows import attend_with_lse, check_served

OPERATOR = "latent_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    check_served(a.query, a.kv_cache, a.block_table)
    return attend_with_lse
