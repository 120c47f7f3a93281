"""Lowers the absorbed form of mla_attention.with_lse to attention_over_rows."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_attention import Arguments, is_absorbed, is_chosen_at_run_time
from mla_fx.ops.emitted.mla_attention_with_lse import absorbed

from .attention_over_rows import attend_with_lse, check_served

OPERATOR = "mla_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    check_served(a.q_nope, a.kv_cache, a.block_table)
    if is_chosen_at_run_time(a) or not is_absorbed(a):
        raise NoMatch("the kernel is for absorbed queries")
    return absorbed_over_rows


def absorbed_over_rows(a: Arguments) -> tuple[Tensor, Tensor]:
    return absorbed(a, attend_with_lse)
