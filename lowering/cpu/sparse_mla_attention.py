"""Lowers sparse_mla_attention to attention_over_rows or, if most keys are chosen, to attention to all keys in parts."""

from collections.abc import Callable

from torch import Tensor

from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import sparse_mla_attention
from mla_fx.ops.emitted.pages import context_of
from mla_fx.ops.emitted.sparse_latent_attention import check_numbers
from mla_fx.ops.emitted.sparse_mla_attention import Arguments, fewest, kernel, over_all

from . import prompts, sparse_latent_attention
from .attention_over_rows import DTYPES, check_served

OPERATOR = "sparse_mla_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.q_nope, a.kv_cache, a.indices)
    return chosen_by_call


def run(a: Arguments) -> Tensor:
    """The same as sparse_mla_attention."""
    context = context_of(a.kv_cache, a.block_table)
    check_numbers(a.indices, context)
    is_checked = a.q_nope.dtype not in DTYPES  # a rewrite, with numbers that may name a key twice
    if is_checked or context >= fewest(a.indices.shape[-1], a.q_nope.shape[2]):
        return kernel(a, sparse_latent_attention.run_chosen)
    if a.q_nope.shape[1] <= a.max_absorbed_tokens:
        return kernel(a, sparse_latent_attention.run)
    return prompts.in_parts(over_all(a))


chosen_by_call = define_lean_on(
    Arguments, "sparse_mla_attention_over_rows", run, sparse_mla_attention.fake, returns=("out",)
)
