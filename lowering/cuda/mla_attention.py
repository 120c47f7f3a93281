"""Lowers the absorbed form of mla_attention to split_keys, or to a library of the user's. Prompts are PyTorch's own
attention, as in `loops`."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_attention import Arguments, absorbed, in_latent_space, is_absorbed, is_chosen_at_run_time

from ..loops.mla_attention import at_run_time, check_forms, tiled
from .split_keys import attend, check_served

OPERATOR = "mla_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    if is_chosen_at_run_time(a):
        check_served(a.kv_cache, 1)  # few enough tokens to be absorbed
        check_forms(a)
        return chosen
    if not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")
    check_served(a.kv_cache, a.q_nope.shape[1])
    return absorbed_in_parts


def absorbed_in_parts(a: Arguments) -> Tensor:
    return absorbed(a, attend)


def chosen(a: Arguments) -> Tensor:
    """Both forms are traced."""
    return at_run_time(a, tiled, absorbed_in_parts)


def lower_to(library: Any, a: Arguments) -> Callable[[Arguments], Tensor]:
    chooses = is_chosen_at_run_time(a)
    if not chooses and not is_absorbed(a):
        raise NoMatch("it takes absorbed queries")
    library.check(a, in_latent_space(a).query)
    if chooses:
        check_forms(a)
    return absorbed_by(library, chooses)


@functools.cache  # one function for equal calls, which are traced once
def absorbed_by(library: Any, chooses: bool) -> Callable[[Arguments], Tensor]:
    def of(a: Arguments) -> Tensor:
        return absorbed(a, library.attend)

    return functools.partial(at_run_time, expand=tiled, absorb=of) if chooses else of
