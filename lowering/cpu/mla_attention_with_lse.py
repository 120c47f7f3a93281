"""Lowers mla_attention.with_lse to attention_over_rows: the absorbed form, and the expanded one where that is fast."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import mla_attention_with_lse
from mla_fx.ops.emitted.mla_attention import Arguments, is_absorbed, is_chosen_at_run_time
from mla_fx.ops.emitted.mla_attention_with_lse import absorbed, kernel

from . import attention_over_rows, heads_over_rows
from .attention_over_rows import attend_with_lse, check_served

OPERATOR = "mla_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    is_one_form = not is_chosen_at_run_time(a)
    if heads_over_rows.is_fast(a) and not (is_one_form and is_absorbed(a)):
        if is_one_form and not heads_over_rows.has_many_scores(a):
            raise NoMatch("compiled loops are for few scores")
        return chosen_by_call
    check_served(a.q_nope, a.kv_cache, a.block_table)
    if not is_one_form or not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")
    return absorbed_over_rows


def absorbed_over_rows(a: Arguments) -> tuple[Tensor, Tensor]:
    return absorbed(a, attend_with_lse)


def _run(a: Arguments) -> tuple[Tensor, Tensor]:
    if is_absorbed(a):
        return absorbed(a, attention_over_rows.run)
    return heads_over_rows.attend_with_lse(a) if heads_over_rows.is_fast(a) else kernel(a)


chosen_by_call = define_lean_on(
    Arguments, "mla_attention_with_lse_over_rows", _run, mla_attention_with_lse.fake, returns=("out", "lse")
)
