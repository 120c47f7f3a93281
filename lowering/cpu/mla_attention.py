"""Lowers the absorbed form of mla_attention to attention_over_rows, and the expanded one to parts of a prompt."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import mla_attention
from mla_fx.ops.emitted.mla_attention import (
    Arguments,
    absorbed,
    has_few_scores,
    is_absorbed,
    is_chosen_at_run_time,
    is_masked,
)

from ..loops.mla_attention import at_run_time, check_forms, tiled
from . import heads_over_rows, prompts
from .attention_over_rows import attend, check_served, run

OPERATOR = "mla_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    chooses = is_chosen_at_run_time(a)
    if not chooses and not is_absorbed(a):
        if _is_small(a) or not _is_better_called(a):
            raise NoMatch("compiled loops are for few scores, and for prompts without a mask")
        return chosen_by_call
    check_served(a.q_nope, a.kv_cache, a.block_table)
    if not chooses:
        return absorbed_over_rows
    try:
        check_forms(a)
    except NoMatch:
        return chosen_by_call
    return chosen


def _is_small(a: Arguments) -> bool:
    """Whether nothing is faster than products that store all scores."""
    return not heads_over_rows.has_many_scores(a) if heads_over_rows.is_fast(a) else has_few_scores(a)


def _is_better_called(a: Arguments) -> bool:
    """Whether the expanded form is a call, rather than compiled: compiled code would store a mask in another dtype, and
    read keys that it hides."""
    return heads_over_rows.is_fast(a) or (a.q_nope.device.type == "cpu" and is_masked(a))


def absorbed_over_rows(a: Arguments) -> Tensor:
    return absorbed(a, attend)


def chosen(a: Arguments) -> Tensor:
    """Both forms are traced."""
    return at_run_time(a, chosen_by_call if _is_better_called(a) else tiled, absorbed_over_rows)


def _run(a: Arguments) -> Tensor:
    if is_absorbed(a) or (has_few_scores(a) and not heads_over_rows.is_fast(a)):
        return mla_attention.kernel(a, lambda latent: run(latent)[0])
    return prompts.in_parts(a)


chosen_by_call = define_lean_on(Arguments, "mla_attention_over_rows", _run, mla_attention.fake, returns=("out",))
