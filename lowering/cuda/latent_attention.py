"""Lowers latent_attention to split_keys, or to a library of the user's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from .split_keys import attend, attend_with_lse, check_served

OPERATOR = "latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.kv_cache, a.query.shape[1])
    return attend


def lower_with_lse(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    check_served(a.kv_cache, a.query.shape[1])
    return attend_with_lse


def lower_to(library: Any, a: Arguments) -> Any:
    library.check(a, a.query)
    return library.attend


def lower_to_with_lse(library: Any, a: Arguments) -> Any:
    library.check(a, a.query)
    return library.attend_with_lse
