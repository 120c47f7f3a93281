"""Lowers latent_attention to attention_over_rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from .attention_over_rows import attend, check_served

OPERATOR = "latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.query, a.kv_cache)
    return attend
