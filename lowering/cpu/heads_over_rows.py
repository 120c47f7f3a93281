"""Expanded attention by attention_over_rows: keys and values are expanded for a few sequences or heads at a time."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.common.machine import multiplies_pairs, multiplies_tiles
from mla_fx.ops.emitted import latent_attention, mla_attention_with_lse
from mla_fx.ops.emitted.mla_attention import Arguments, unpaged
from mla_fx.ops.emitted.pages import context_of
from mla_fx.ops.emitted.tiled_attention import count_of_scores, parts, seen_keys

from . import attention_over_rows

EXPANDED = 2**23  # elements of keys and values at a time; measured: memory is taken anew for larger ones
FEW_SCORES = 2**20  # measured: loops take no longer for these


def is_fast(a: Arguments) -> bool:
    """Whether this is faster than PyTorch's kernel, which multiplies bfloat16 fast by AMX alone."""
    is_served = a.q_nope.dtype == torch.bfloat16 and a.q_nope.device.type == "cpu"
    return is_served and multiplies_pairs() and not multiplies_tiles() and attention_over_rows.is_built()


def has_many_scores(a: Arguments) -> bool:
    """Whether loops are slower; True if sizes are symbols."""
    scores = count_of_scores(a.q_nope, context_of(a.kv_cache, a.block_table))
    return scores is None or scores > FEW_SCORES


def attend(a: Arguments) -> Tensor:
    """The same as the expanded form of mla_attention."""
    return attend_with_lse(a)[0]


def attend_with_lse(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same as the expanded form of mla_attention.with_lse, whose logarithms leave out sinks."""
    a, (out, lse) = unpaged(a), mla_attention_with_lse.fake(a)
    weight = _one_weight(a.weight_uk, a.weight_uv)
    heads, width = weight.shape[:2]
    of_head = max(1, a.kv_cache.shape[1] * width)
    for first, last in parts(out.shape[0], max(1, EXPANDED // max(1, of_head * heads))):
        some = _of_sequences(a, slice(first, last))
        for first_head, last_head in parts(heads, max(1, EXPANDED // of_head)):
            own = slice(first, last), slice(None), slice(first_head, last_head)
            part, sums = _of_heads(some, weight[own[2]], own[2])
            out[own], lse[own] = part, sums
    return out, lse


def _one_weight(weight_uk: Tensor, weight_uv: Tensor) -> Tensor:
    """[N, D + Dv, R], as it is stored if both are parts of it: a copy for each call takes as long as a small prompt."""
    nope, (heads, value, rank) = weight_uk.shape[1], weight_uv.shape
    strides = (nope + value) * rank, rank, 1
    is_next = weight_uv.data_ptr() == weight_uk.data_ptr() + nope * rank * weight_uk.element_size()
    if is_next and weight_uk.stride() == weight_uv.stride() == strides:
        return weight_uk.as_strided((heads, nope + value, rank), strides)
    return torch.cat((weight_uk, weight_uv), 1)


def _of_sequences(a: Arguments, some: slice) -> Arguments:
    """The same for some sequences, up to the last key that a row of one sees."""
    q_rope = None if a.q_rope is None else a.q_rope[some]
    lens = a.context_lens if a.context_lens is None or len(a.context_lens) == 1 else a.context_lens[some]
    mask = None if a.mask is None else a.mask[(None,) * (4 - a.mask.dim())]
    mask = mask if mask is None or mask.shape[0] == 1 else mask[some]
    a = replace(a, q_nope=a.q_nope[some], q_rope=q_rope, context_lens=lens, mask=mask)
    end = _end(a)
    kr_cache = None if a.kr_cache is None else a.kr_cache[some, :end]
    mask = None if mask is None else mask[..., :end]
    return replace(a, kv_cache=a.kv_cache[some, :end], kr_cache=kr_cache, mask=mask)


def _end(a: Arguments) -> int:
    """The number of keys up to the last one that a row sees, at least one if there are keys."""
    steps, context = a.q_nope.shape[1], a.kv_cache.shape[1]
    if a.fill is not None:
        return context
    if a.context_lens is not None:
        return min(context, max(1, int(a.context_lens.max())))
    if a.is_causal:
        return min(steps, context)
    seen = seen_keys(a.mask)
    if seen is None or seen.shape[1] == 1:
        return context
    places = seen.any(0).flatten().nonzero()
    return int(places[-1]) + 1 if len(places) else 1


def _of_heads(a: Arguments, weight: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
    """[B, S, N, Dv] and [B, S, N] of some heads, whose weights are [N, D + Dv, R]."""
    batch, end, rank = a.kv_cache.shape
    both = (a.kv_cache.reshape(-1, rank) @ weight.reshape(-1, rank).mT).view(batch, end, *weight.shape[:2])
    both = both.transpose(1, 2)
    keys, values = torch.split(both, [a.weight_uk.shape[1], a.weight_uv.shape[1]], -1)
    query, q_rope = a.q_nope[:, :, heads], None if a.q_rope is None else a.q_rope[:, :, heads]
    mask = a.mask if a.mask is None or a.mask.shape[1] == 1 else a.mask[:, heads]
    operands = query, q_rope, keys, a.kr_cache, mask, a.context_lens, None if a.sinks is None else a.sinks[heads]
    own = latent_attention.Arguments(*operands, scale=a.scale, is_causal=a.is_causal, fill=a.fill)
    out = query.new_empty(*query.shape[:3], values.shape[3])
    lse = out.new_empty(out.shape[:3], dtype=torch.float32)
    attention_over_rows.run_into(own, out, lse, values)
    return out, lse
