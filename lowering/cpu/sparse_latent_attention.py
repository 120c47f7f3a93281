"""Lowers sparse_latent_attention to attention_over_rows: over the chosen rows or, if most are chosen, over all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.emitted import latent_attention, sparse_latent_attention
from mla_fx.ops.emitted.attention import as_mask, masked
from mla_fx.ops.emitted.pages import context_of
from mla_fx.ops.emitted.sparse_latent_attention import PAYS, Arguments, check_numbers, over_rows

from . import attention_over_rows
from .attention_over_rows import check_served

OPERATOR = "sparse_latent_attention"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    check_served(a.query, a.kv_cache, a.indices)
    return chosen_by_call


def over_all(a: Arguments) -> latent_attention.Arguments:
    """The same as attention to all keys under a mask. It adds the logarithm of how often each key is chosen."""
    keys, context = a.indices.squeeze(2).to(torch.int64), context_of(a.kv_cache, a.block_table)
    counts = a.query.new_zeros(*keys.shape[:2], context + 1, dtype=accumulation_dtype(a.query.dtype))
    keys = keys.masked_fill(keys < 0, context)  # the last count is of places without a key
    counts.scatter_add_(-1, keys, counts.new_ones(keys.shape))
    mask = counts[..., :context].log().unsqueeze(1)
    for given in (a.mask, as_mask(None, a.context_lens, False, a.query, context)):
        if given is not None:
            mask = masked(mask, given, None)
    operands = a.query, a.query_rope, a.kv_cache, a.kr_cache
    scales = a.kv_scales, a.kr_scales
    return latent_attention.Arguments(*operands, mask, None, a.sinks, a.block_table, *scales, scale=a.scale)


def run(a: Arguments) -> Tensor:
    context = context_of(a.kv_cache, a.block_table)
    check_numbers(a.indices, context)
    if context < PAYS * a.indices.shape[-1]:
        return attention_over_rows.run(over_all(a))[0]
    return run_chosen(a)


def run_chosen(a: Arguments) -> Tensor:
    return attention_over_rows.run(over_rows(a))[0].view(a.query.shape)


chosen_by_call = define_lean_on(
    Arguments, "sparse_attention_over_rows", run, sparse_latent_attention.fake, returns=("out",)
)
