"""Lowers the absorbed form of mla_attention to split_keys, or to a library of the user's, and large prompts to parts.
Other prompts are PyTorch's own attention, as in `loops`."""

import contextlib
from typing import Any

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_attention import CHOOSES, Arguments, is_absorbed, is_chosen_at_run_time
from mla_fx.target import Compiled

from ..loops.mla_attention import absorbed_by, at_run_time, check_forms, tiled
from . import prompts
from .libraries import check_absorbed
from .split_keys import attend, check_served

OPERATOR = "mla_attention"


def lower(a: Arguments) -> Compiled:
    refuse_rows(a)
    if a.return_lse:
        refuse_expanded(a)
    if is_chosen_at_run_time(a):
        check_served(a.kv_cache, 1)  # few enough tokens to be absorbed
        check_forms(a)
        return chosen
    if not is_absorbed(a):
        return prompts.lower(a)
    check_served(a.kv_cache, a.q_nope.shape[1])
    return absorbed_by(attend)


def refuse_rows(a: Arguments) -> None:
    for name, rows in (("indices", a.indices), ("lens", a.lens)):
        if rows is not None:
            raise NoMatch(f"{name} are given; the kernel is for absorbed queries and for prompts of whole contexts")


def refuse_expanded(a: Arguments) -> None:
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)
    if not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")


def chosen(a: Arguments) -> tuple[Tensor, Tensor]:
    """Both forms are traced."""
    return at_run_time(a, expanded(a), absorbed_by(attend))


def expanded(a: Arguments) -> Compiled:
    with contextlib.suppress(NoMatch):
        return prompts.lower(a)
    return tiled


def lower_to(library: Any, a: Arguments) -> Compiled:
    check_absorbed(a, library)
    return absorbed_by(library.attend)
