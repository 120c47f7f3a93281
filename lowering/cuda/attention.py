"""Lowers attention over latents to split_keys, or to a library of the user's, and large prompts to parts. Other prompts
are PyTorch's own attention, as in `loops`."""

import contextlib
from typing import Any

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    HEADS,
    Arguments,
    Results,
    is_absorbed,
    is_chosen_at_run_time,
)
from mla_fx.ops.emitted.attention.chosen_rows import over_rows
from mla_fx.ops.emitted.attention.heads import in_latent_space
from mla_fx.ops.emitted.attention.latents import of_queries
from mla_fx.target import Compiled

from ..loops.attention import absorbed_by, at_run_time, check_forms, tiled
from . import prompts
from .split_keys import attend, check_served

OPERATOR = "attention"


def lower(a: Arguments) -> Compiled:
    return lower_latents(a) if a.weight_uk is None else lower_heads(a)


def lower_latents(a: Arguments) -> Compiled:
    """Lower a call without weights."""
    if a.indices is not None:
        check_served(a, 1, "indices")
        return attend_chosen
    check_served(a, a.query.shape[1])
    return attend


def attend_chosen(a: Arguments) -> Results:
    """Each query is a sequence of its own, whose pages are the rows that it chose. Their places are compiled code."""
    return of_queries(attend(over_rows(a)), a)


def lower_heads(a: Arguments) -> Compiled:
    if a.return_lse:
        check_absorbed(a)
    if is_chosen_at_run_time(a):
        check_served(a, 1, *HEADS)  # few enough tokens to be absorbed
        check_forms(a)
        return chosen
    if not is_absorbed(a):
        return prompts.lower(a)
    check_served(a, a.query.shape[1], *HEADS)
    return absorbed_by(attend)


def chosen(a: Arguments) -> Results:
    """Both forms are traced."""
    return at_run_time(a, expanded(a), absorbed_by(attend))


def expanded(a: Arguments) -> Compiled:
    with contextlib.suppress(NoMatch):
        return prompts.lower(a)
    return tiled


def lower_to(library: Any, a: Arguments) -> Compiled:
    attend: Compiled = library.attend
    if a.weight_uk is None:
        library.check(a)
        return attend
    check_absorbed(a)
    library.check(in_latent_space(a))
    return absorbed_by(attend)


def check_absorbed(a: Arguments) -> None:
    """Raise NoMatch for a call of heads that is not absorbed when it is compiled."""
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)  # a conditional would copy the views of one cache
    if not is_absorbed(a):
        raise NoMatch("it takes absorbed queries")
