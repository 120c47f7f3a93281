"""Attention to chosen keys by attention_over_rows: over the chosen rows or, if most are chosen, over all of them."""

from dataclasses import replace

from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.emitted.attention import chosen_rows, heads
from mla_fx.ops.emitted.attention.arguments import RESULTS, Arguments, Results
from mla_fx.ops.emitted.attention.chosen_rows import check_numbers
from mla_fx.ops.emitted.attention.kernel_operands import asked
from mla_fx.ops.emitted.attention.operator import fake
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.softmax import as_mask, masked

from . import attention_over_rows, costs, prompts
from .attention_over_rows import DTYPES


def of_latents(a: Arguments) -> Arguments:
    """Turn a call into attention to all keys. Its mask adds the logarithm of how often each key is chosen."""
    assert a.indices is not None, "keys are chosen"
    keys, context = a.indices.squeeze(2).long(), context_of(a.kv_cache, a.block_table)
    counts = a.query.new_zeros(*keys.shape[:2], context + 1, dtype=accumulation_dtype(a.query.dtype))
    keys = keys.masked_fill(keys < 0, context)  # the last count is of places without a key
    counts.scatter_add_(-1, keys, counts.new_ones(keys.shape))
    mask = counts[..., :context].log().unsqueeze(1)
    for given in (a.mask, as_mask(None, a.context_lens, False, a.query, context)):
        if given is not None:
            mask = masked(mask, given, None)
    return replace(a, mask=mask, context_lens=None, indices=None)


def run(a: Arguments) -> Results:
    """Compute attention without weights over the chosen rows or, if most keys are chosen, over all."""
    assert a.indices is not None, "keys are chosen"
    context = context_of(a.kv_cache, a.block_table)
    check_numbers(a.indices, context)
    if context < costs.CHOSEN * a.indices.shape[-1]:
        return attention_over_rows.run(of_latents(a))
    return attention_over_rows.run(a)


def run_prompt(a: Arguments) -> Results:
    """Compute attention of heads without logarithms over the chosen rows or, if most keys are chosen, over all."""
    assert a.indices is not None, "keys are chosen"
    context = context_of(a.kv_cache, a.block_table)
    check_numbers(a.indices, context)
    is_checked = a.query.dtype not in DTYPES  # a rewrite, with numbers that may name a key twice
    if is_checked or context >= costs.fewest(a.indices.shape[-1], a.query.shape[2]):
        return heads.by_rows(a, attention_over_rows.run)
    if a.query.shape[1] <= a.max_absorbed_tokens:
        return heads.by_rows(a, run)
    return prompts.in_parts(chosen_rows.over_all(a))


attend = define_lean_on(Arguments, "sparse_attention_over_rows", run, asked, returns=RESULTS)
attend_prompt = define_lean_on(Arguments, "sparse_mla_attention_over_rows", run_prompt, fake, returns=RESULTS)
