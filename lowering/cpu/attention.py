"""Lowers attention to the kernel attention_over_rows, or to parts of a prompt."""

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    RESULTS,
    Arguments,
    Results,
    is_absorbed,
    is_chosen_at_run_time,
    is_masked,
    refuse_others,
)
from mla_fx.ops.emitted.attention.codes import dtype_of
from mla_fx.ops.emitted.attention.heads import absorbed
from mla_fx.ops.emitted.attention.operator import fake, kernel
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.tiles import count_of_scores
from mla_fx.target import Compiled

from ..loops.attention import absorbed_by, at_run_time, check_forms, from_copies, has_few_scores, tiled
from . import chosen_keys, costs, heads_over_rows, packed_sequences, prompts
from .attention_over_rows import TAKES, attend, check_served, run

OPERATOR = "attention"

absorbed_over_rows = absorbed_by(attend)


def lower(a: Arguments) -> Compiled:
    refuse_others(a, "the kernel", *TAKES)
    return lower_latents(a) if a.weight_uk is None else lower_heads(a)


def lower_latents(a: Arguments) -> Compiled:
    """Lower a call without weights: to the kernel, or to loops over copies of few keys."""
    check_served(a)
    if a.indices is not None:
        return chosen_keys.attend
    context = context_of(a.kv_cache, a.block_table)
    scores = count_of_scores(a.query, context)
    if scores is None or a.return_lse:
        return attend
    most = costs.SCORES_IN_ONE_PIECE if context <= costs.COPIED_KEYS else costs.SCORES_IN_PAGES
    return from_copies if scores <= costs.of_loops(most, dtype_of(a)) else attend


def lower_heads(a: Arguments) -> Compiled:
    if a.return_lse and (a.indices is not None or a.lens is not None):
        raise NoMatch("chosen keys of prompts and packed sequences have no logarithms in the kernel")
    if a.indices is not None:
        check_served(a)
        return chosen_keys.attend_prompt
    if a.lens is not None:
        return packed_sequences.lower(a)
    if is_chosen_at_run_time(a):
        return lower_both_forms(a)
    if is_absorbed(a):
        check_served(a)
        return absorbed_over_rows
    if _is_small(a) or not _is_better_called(a):
        raise NoMatch("compiled loops are for few scores, and for prompts without a mask")
    return chosen_by_call


def lower_both_forms(a: Arguments) -> Compiled:
    """Lower a call that chooses its form by its query tokens: to a conditional, or to a call if one cannot be compiled.
    Loops return no logarithms."""
    if a.return_lse:
        if not heads_over_rows.is_fast(a):
            raise NoMatch(CHOOSES)
        return chosen_by_call
    check_served(a)
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
    read keys that it hides. With logarithms, only the fast kernel is a call."""
    is_on_cpu = a.query.device.type == "cpu"
    return heads_over_rows.is_fast(a) or (is_on_cpu and is_masked(a) and not a.return_lse)


def chosen(a: Arguments) -> Results:
    """Both forms are traced."""
    return at_run_time(a, chosen_by_call if _is_better_called(a) else tiled, absorbed_over_rows)


def _run(a: Arguments) -> Results:
    if is_absorbed(a):
        return absorbed(a, run)
    if heads_over_rows.is_fast(a):
        return heads_over_rows.attend(a)
    return kernel(a) if a.return_lse or has_few_scores(a) else prompts.in_parts(a)


chosen_by_call = define_lean_on(Arguments, "mla_attention_over_rows", _run, fake, returns=RESULTS)
