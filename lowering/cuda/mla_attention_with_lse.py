"""Lowers the absorbed form of mla_attention.with_lse to split_keys, or to a library of the user's."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_attention import CHOOSES, Arguments, is_absorbed, is_chosen_at_run_time
from mla_fx.ops.emitted.mla_attention_with_lse import absorbed

from .libraries import check_absorbed
from .split_keys import attend_with_lse, check_served

OPERATOR = "mla_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)
    if not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")
    check_served(a.kv_cache, a.q_nope.shape[1])
    return absorbed_in_parts


def absorbed_in_parts(a: Arguments) -> tuple[Tensor, Tensor]:
    return absorbed(a, attend_with_lse)


def lower_to(library: Any, a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    check_absorbed(a, library)
    return absorbed_by(library)


@functools.cache  # one function for equal calls, which are traced once
def absorbed_by(library: Any) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    def of(a: Arguments) -> tuple[Tensor, Tensor]:
        return absorbed(a, library.attend_with_lse)

    return of
