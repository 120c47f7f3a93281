"""Lowers the absorbed form of mla_attention to attention_over_rows."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import mla_attention
from mla_fx.ops.emitted.mla_attention import Arguments, absorbed, is_absorbed, is_chosen_at_run_time

from ..loops.mla_attention import at_run_time, check_forms, tiled
from .attention_over_rows import attend, check_served, run
from .lean import define_lean_on

OPERATOR = "mla_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.q_nope, a.kv_cache, a.block_table)
    if not is_chosen_at_run_time(a):
        if is_absorbed(a):
            return absorbed_over_rows
        raise NoMatch("the kernel is for absorbed queries")
    try:
        check_forms(a)
    except NoMatch:
        return chosen_by_call
    return chosen


def absorbed_over_rows(a: Arguments) -> Tensor:
    return absorbed(a, attend)


def chosen(a: Arguments) -> Tensor:
    """Both forms are compiled."""
    return at_run_time(a, tiled, absorbed_over_rows)


def _run(a: Arguments) -> Tensor:
    return mla_attention.kernel(a, lambda latent: run(latent)[0])


chosen_by_call = define_lean_on(Arguments, "mla_attention_over_rows", _run, mla_attention.fake, returns=("out",))
