"""Expanded attention by attention_over_rows: keys and values are expanded for a few sequences or heads at a time."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.common import machine
from mla_fx.ops.emitted.attention.arguments import Arguments, Results
from mla_fx.ops.emitted.attention.operator import room
from mla_fx.ops.emitted.attention.pages import context_of, unpaged
from mla_fx.ops.emitted.attention.parts import of_heads, of_sequences
from mla_fx.ops.emitted.attention.softmax import aligned, fake_sums
from mla_fx.ops.emitted.attention.tiles import count_of_scores, last_seen, parts

from . import attention_over_rows, costs, wide_products

EXPANDED = 2**23  # elements of keys and values at a time; measured: memory is taken anew for larger ones


def is_fast(a: Arguments) -> bool:
    """Whether this is faster than PyTorch's kernel, which multiplies bfloat16 fast by AMX alone."""
    is_served = a.query.dtype == torch.bfloat16 and a.query.device.type == "cpu"
    has_pairs_alone = machine.multiplies_pairs() and not machine.multiplies_tiles()
    return is_served and (has_pairs_alone or not machine.multiplies_bfloat16()) and attention_over_rows.is_built()


def has_many_scores(a: Arguments) -> bool:
    """Whether loops are slower; True if sizes are symbols."""
    scores = count_of_scores(a.query, context_of(a.kv_cache, a.block_table))
    return scores is None or scores > costs.of_loops(costs.SCORES_OF_HEADS, a.query.dtype)


def attend(a: Arguments) -> Results:
    """Compute the expanded form."""
    out, lse = _attend(a)
    return out, lse if a.return_lse else lse.new_empty(0)


def _attend(a: Arguments) -> tuple[Tensor, Tensor]:
    a, weight = unpaged(a), one_weight(*a.weights)
    a = a if a.mask is None else replace(a, mask=aligned(a.mask, rows_first=False))
    batch, (heads, width) = a.query.shape[0], weight.shape[:2]
    of_head = max(1, a.kv_cache.shape[1] * width)
    if of_head * heads * batch <= EXPANDED:
        return _of_heads(_up_to_last_key(a), weight)  # whole: cutting takes as long as a small call
    out, lse = _room(a)
    for first, last in parts(batch, max(1, EXPANDED // (of_head * heads))):
        some = _up_to_last_key(of_sequences(a, slice(first, last)))
        for first_head, last_head in parts(heads, max(1, EXPANDED // of_head)):
            own = slice(first_head, last_head)
            part, sums = _of_heads(of_heads(some, own), weight[own])
            out[first:last, :, own], lse[first:last, :, own] = part, sums
    return out, lse


def _room(a: Arguments) -> tuple[Tensor, Tensor]:
    """Room for attention and for logarithms, which the kernel writes in any case."""
    return room(a), fake_sums(a.query)


def one_weight(weight_uk: Tensor, weight_uv: Tensor) -> Tensor:
    """[N, D + Dv, R], as it is stored if both are parts of it: a copy for each call takes as long as a small prompt."""
    nope, (heads, value, rank) = weight_uk.shape[1], weight_uv.shape
    strides = (nope + value) * rank, rank, 1
    is_next = weight_uv.data_ptr() == weight_uk.data_ptr() + nope * rank * weight_uk.element_size()
    if is_next and weight_uk.stride() == weight_uv.stride() == strides:
        return weight_uk.as_strided((heads, nope + value, rank), strides)
    return torch.cat((weight_uk, weight_uv), 1)


def _up_to_last_key(a: Arguments) -> Arguments:
    """Drop the keys behind the last one that some row sees."""
    end = _end(a)
    if end == a.kv_cache.shape[1]:
        return a
    kr_cache = None if a.kr_cache is None else a.kr_cache[:, :end]
    mask = None if a.mask is None else a.mask[..., :end]
    return replace(a, kv_cache=a.kv_cache[:, :end], kr_cache=kr_cache, mask=mask)


def _end(a: Arguments) -> int:
    steps, context = a.query.shape[1], a.kv_cache.shape[1]
    if a.fill is not None:
        return context
    if a.context_lens is not None:
        return min(context, max(1, int(a.context_lens.max())))
    return min(steps, context) if a.is_causal else last_seen(a.mask, context)


def _of_heads(a: Arguments, weight: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, N, Dv] and [B, S, N] for weights [N, D + Dv, R]."""
    batch, end, rank = a.kv_cache.shape
    both = wide_products.product(a.kv_cache.reshape(-1, rank), weight.reshape(-1, rank).mT)
    both = both.view(batch, end, *weight.shape[:2]).transpose(1, 2)
    keys, values = torch.split(both, [weight.shape[1] for weight in a.weights], -1)
    out, lse = _room(a)
    attention_over_rows.run_into(replace(a, kv_cache=keys), out, lse, values)
    return out, lse
