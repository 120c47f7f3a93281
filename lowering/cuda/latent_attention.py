"""Lowers latent_attention to split_keys, or to a library of the user's."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fx.ops.emitted.chosen_rows import over_rows
from mla_fx.ops.emitted.latent_attention import Arguments
from mla_fx.ops.emitted.latent_attention_with_lse import of_queries

from .split_keys import attend, attend_with_lse, check_served

OPERATOR = "latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    if a.indices is not None:
        check_served(a.kv_cache, 1)
        return attend_chosen
    check_served(a.kv_cache, a.query.shape[1])
    return attend


def attend_chosen(a: Arguments) -> Tensor:
    """Each query is a sequence of its own, whose pages are the rows that it chose. Their places are compiled code."""
    return attend(over_rows(a)).view(a.query.shape)


def lower_with_lse(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    if a.indices is not None:
        check_served(a.kv_cache, 1)
        return attend_chosen_with_lse
    check_served(a.kv_cache, a.query.shape[1])
    return attend_with_lse


def attend_chosen_with_lse(a: Arguments) -> tuple[Tensor, Tensor]:
    return of_queries(attend_with_lse(over_rows(a)), a.query)


def lower_to(library: Any, a: Arguments) -> Any:
    library.check(a, a.query)
    return library.attend


def lower_to_with_lse(library: Any, a: Arguments) -> Any:
    library.check(a, a.query)
    return library.attend_with_lse
