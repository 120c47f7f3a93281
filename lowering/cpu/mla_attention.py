"""Lowers the absorbed form of mla_attention to attention_over_rows, and the expanded one under a mask to parts."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted import mla_attention
from mla_fx.ops.emitted.mla_attention import (
    Arguments,
    absorbed,
    has_few_scores,
    is_absorbed,
    is_chosen_at_run_time,
)

from ..loops.mla_attention import at_run_time, check_forms, tiled
from . import prompts
from .attention_over_rows import attend, check_served, run
from .lean import define_lean_on

OPERATOR = "mla_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    if is_prompt_under_mask(a):
        return chosen_by_call
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


def is_prompt_under_mask(a: Arguments) -> bool:
    """Whether many query rows may read expanded keys under a mask. Compiled code stores it all in another dtype, and
    reads keys that are hidden."""
    is_masked = a.mask is not None or a.context_lens is not None
    if not is_masked or a.q_nope.device.type != "cpu":
        return False
    return is_chosen_at_run_time(a) or not (is_absorbed(a) or has_few_scores(a))


def absorbed_over_rows(a: Arguments) -> Tensor:
    return absorbed(a, attend)


def chosen(a: Arguments) -> Tensor:
    """Both forms are compiled."""
    return at_run_time(a, tiled, absorbed_over_rows)


def _run(a: Arguments) -> Tensor:
    if is_absorbed(a) or has_few_scores(a):
        return mla_attention.kernel(a, lambda latent: run(latent)[0])
    return prompts.in_parts(a)


chosen_by_call = define_lean_on(Arguments, "mla_attention_over_rows", _run, mla_attention.fake, returns=("out",))
