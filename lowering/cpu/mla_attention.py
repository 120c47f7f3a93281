"""Lowers the absorbed form of mla_attention to attention_over_rows, and the expanded one to parts of a prompt."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import mla_attention, mla_attention_with_lse
from mla_fx.ops.emitted.mla_attention import (
    Arguments,
    has_few_scores,
    is_absorbed,
    is_chosen_at_run_time,
    is_masked,
)

from ..loops.mla_attention import absorbed_by, absorbed_by_with_lse, at_run_time, check_forms, tiled
from . import chosen_keys, heads_over_rows, packed_sequences, prompts
from .attention_over_rows import attend, attend_with_lse, check_served, run

OPERATOR = "mla_attention"

absorbed_over_rows = absorbed_by(attend)


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    if a.indices is not None:
        check_served(a.q_nope, a.kv_cache, a.indices)
        return chosen_keys.attend_prompt
    if a.lens is not None:
        return packed_sequences.lower(a)
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


def chosen(a: Arguments) -> Tensor:
    """Both forms are traced."""
    return at_run_time(a, chosen_by_call if _is_better_called(a) else tiled, absorbed_over_rows)


def _run(a: Arguments) -> Tensor:
    if is_absorbed(a) or (has_few_scores(a) and not heads_over_rows.is_fast(a)):
        return mla_attention.kernel(a, lambda latent: run(latent)[0])
    return prompts.in_parts(a)


chosen_by_call = define_lean_on(Arguments, "mla_attention_over_rows", _run, mla_attention.fake, returns=("out",))


def lower_with_lse(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    """To attention_over_rows: the absorbed form, and the expanded one where that is fast."""
    if a.indices is not None:
        raise NoMatch("chosen keys of a prompt have no logarithms in the kernel")
    if a.lens is not None:
        raise NoMatch("packed sequences have no logarithms in the kernel")
    is_one_form = not is_chosen_at_run_time(a)
    if heads_over_rows.is_fast(a) and not (is_one_form and is_absorbed(a)):
        if is_one_form and not heads_over_rows.has_many_scores(a):
            raise NoMatch("compiled loops are for few scores")
        return chosen_by_call_with_lse
    check_served(a.q_nope, a.kv_cache, a.block_table)
    if not is_one_form or not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")
    return absorbed_by_with_lse(attend_with_lse)


def _run_with_lse(a: Arguments) -> tuple[Tensor, Tensor]:
    if is_absorbed(a):
        return mla_attention_with_lse.absorbed(a, run)
    return heads_over_rows.attend_with_lse(a) if heads_over_rows.is_fast(a) else mla_attention_with_lse.kernel(a)


chosen_by_call_with_lse = define_lean_on(
    Arguments, "mla_attention_with_lse_over_rows", _run_with_lse, mla_attention_with_lse.fake, returns=("out", "lse")
)
