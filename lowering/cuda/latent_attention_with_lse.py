"""Lowers latent_attention.with_lse to split_keys."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from .served import check_served
from .split_keys import operator

OPERATOR = "latent_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    check_served(a.query, a.kv_cache, a.query.shape[1])
    return attend_with_lse


def attend_with_lse(a: Arguments) -> tuple[Tensor, Tensor]:
    out, lse = operator(a)
    return out, lse
