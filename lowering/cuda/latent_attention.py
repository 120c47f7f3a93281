"""Lowers latent_attention to split_keys, or to a library of the user's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from .split_keys import attend, check_served

OPERATOR = "latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.kv_cache, a.query.shape[1])
    return attend


def lower_to(library: Any, a: Arguments) -> Callable[[Arguments], Tensor]:
    library.check(a, a.query)
    found: Callable[[Arguments], Tensor] = library.attend
    return found
