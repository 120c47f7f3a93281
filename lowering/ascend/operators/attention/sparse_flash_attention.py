"""Attention to chosen keys by torch_npu.npu_sparse_flash_attention (SparseFlashAttention in graphs).

The source is op-plugin's document of that operator (August 2026), and sparse_flash_attention_tiling.cpp of
ops-transformer."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.emitted.attention.arguments import Arguments, Results, refuse_others
from mla_fx.ops.emitted.attention.chosen_rows import seen_places
from mla_fx.ops.emitted.attention.softmax import fake_sums
from mla_fx.target import Compiled

from ... import causal_masks, limits
from ...fused_infer_attention_score import LATENT_HEADS, RANK, ROPE
from ...limits import A2, A3, Surface
from ..lightning_index import PAGES, key_lengths, keys_of

KERNEL = "SparseFlashAttention"

CHIPS = (A2, A3)
TAKES = "indices", "mask", "context_lens", "block_table"
ABSORBED = 2  # the only attention mode: values are the latents of keys


def lower(surface: Surface, a: Arguments) -> Compiled:
    limits.chip(surface, KERNEL, CHIPS)
    refuse_others(a, KERNEL, *TAKES)
    limits.size("query has N", a.query.shape[2], KERNEL, LATENT_HEADS)
    limits.size("query has Hckv", a.query.shape[3], KERNEL, (RANK,))
    limits.dtype("query", a.query, KERNEL, limits.HALVES)
    if a.query_rope is not None:
        limits.size("query_rope has Dr", a.query_rope.shape[3], KERNEL, (ROPE,))
    if a.mask is not None:
        causal_masks.refuse(surface, a.mask, a.query.shape[1], KERNEL)
    if a.block_table is not None:
        limits.page_size("kv_cache", a.kv_cache.shape[1], KERNEL, PAGES)
    return plain


def plain(surface: Surface, a: Arguments) -> Results:
    """The results of `mla_fx.attention` without logarithms. Without a rotary part, the kernel gets one of zeros.

    Where all chosen keys of a row are hidden, the kernel averages over them, and the operator has zeros."""
    mask, a = a.mask, with_lengths(a)
    assert a.indices is not None, "keys are chosen"
    latents, table = keys_of(a.kv_cache, a.block_table)
    lengths, mode = key_lengths(a, a.kv_cache)
    if a.query_rope is None or a.kr_cache is None:
        query_rope, keys = (x.new_zeros(*x.shape[:3], ROPE) for x in (a.query, latents))
    else:
        query_rope, (keys, _) = a.query_rope, keys_of(a.kr_cache, None)
    out: Tensor = torch.ops.npu.npu_sparse_flash_attention(
        a.query.contiguous(),
        latents,
        latents,
        a.indices.to(torch.int32).contiguous(),
        a.scale,
        block_table=table,
        actual_seq_lengths_kv=lengths,
        query_rope=query_rope.contiguous(),
        key_rope=keys,
        layout_query="BSND",
        layout_kv="BSND" if table is None else "PA_BSND",
        sparse_mode=mode,
        attention_mode=ABSORBED,
    )[0]
    out = causal_masks.checked(out.masked_fill(~sees_some(a).unsqueeze(-1), 0), mask, a.context_lens)
    return out, fake_sums(a.query, return_lse=False)


def with_lengths(a: Arguments) -> Arguments:
    """The same with the lengths of a mask that is declared causal."""
    return a if a.mask is None else replace(a, mask=None, context_lens=causal_masks.lengths(a.mask))


def sees_some(a: Arguments) -> Tensor:
    """Whether a row sees a key that it chose, [B, S, 1]."""
    return seen_places(a).any(-1)
