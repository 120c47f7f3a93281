"""Lowers latent_attention to split_keys, or to a library of the user's."""

from typing import Any

from torch import Tensor

from mla_fx.ops.emitted.chosen_rows import over_rows
from mla_fx.ops.emitted.latent_attention import Arguments, of_queries
from mla_fx.target import Compiled

from .split_keys import attend, check_served

OPERATOR = "latent_attention"


def lower(a: Arguments) -> Compiled:
    if a.indices is not None:
        check_served(a.kv_cache, 1)
        return attend_chosen
    check_served(a.kv_cache, a.query.shape[1])
    return attend


def attend_chosen(a: Arguments) -> tuple[Tensor, Tensor]:
    """Each query is a sequence of its own, whose pages are the rows that it chose. Their places are compiled code."""
    return of_queries(attend(over_rows(a)), a)


def lower_to(library: Any, a: Arguments) -> Compiled:
    library.check(a, a.query)
    attend: Compiled = library.attend
    return attend
