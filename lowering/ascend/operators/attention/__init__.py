"""Lowers attention to FusedInferAttentionScore, and to SparseFlashAttention over chosen keys, which has its own file.

Over latents, FusedInferAttentionScore gets pages: queries [B,S,N,512] and [B,S,N,64], one key head. For heads, it gets
expanded keys and values in packed rows, any number of tokens: queries [B*S,N,128] and [B*S,N,64], keys and values
[B*T,N,128]. Without a rotary part, queries and keys may have 192 columns, and then values may too."""

from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    HEADS,
    HIDING,
    Arguments,
    Results,
    is_chosen_at_run_time,
    refuse_others,
)
from mla_fx.ops.emitted.attention.pages import READS_PAGES, context_of, from_start
from mla_fx.ops.emitted.attention.softmax import fake_sums
from mla_fx.target import Compiled

from ... import fused_infer_attention_score as kernel
from ... import limits
from ...causal_masks import checked
from ...fused_infer_attention_score import (
    EXPANDED,
    EXPANDED_UNROTATED,
    KERNEL,
    LATENT_TOKENS,
    RANK,
    ROPE,
    RULES,
    Lengths,
)
from ...limits import Surface
from ...prolog_form import PAGE_SIZES, page_size
from . import sparse_flash_attention

OPERATOR = "attention"
PAGE = 128  # tokens of a page, if the cache does not determine it
TAKES_OF_LATENTS = (*HIDING, "fill", "block_table", "return_lse")
TAKES_OF_HEADS = (*HEADS, *HIDING, "fill", "sinks", "return_lse")
PACKED = "packed sequences are attended to one by one"
CHOSEN = "no kernel attends to chosen keys with queries that are not absorbed"


def lower(surface: Surface, a: Arguments) -> Compiled:
    return lower_latents(surface, a) if a.weight_uk is None else lower_heads(surface, a)


def refuse_body(a: Arguments) -> None:
    if a.indices is not None or a.lens is not None:
        return
    has_heads = a.weight_uk is not None
    if a.block_table is not None and (a.max_absorbed_tokens != 0 or not has_heads):
        raise NoMatch(READS_PAGES)
    if has_heads and is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)


def results(a: Arguments, out: Tensor, sums: Tensor, lengths: Tensor | None) -> Results:
    """The kernel's attention [B,S,N,D] and, if they are asked for, logarithms [B,S,N,1], for the lengths that it got.
    Plus infinity marks a row that sees no key."""
    out = checked(out, a.mask, lengths)
    if not a.return_lse:
        return out, fake_sums(a.query, a.return_lse)
    lse = torch.where(sums == torch.inf, of_hidden_scores(a, sums), sums)
    return out, checked(lse, a.mask, lengths).squeeze(-1)


def of_hidden_scores(a: Arguments, lse: Tensor) -> Tensor | float:
    """Return the log-sum-exp of a row in which all scores are hidden."""
    if a.fill is None:
        return -torch.inf
    scores = max(a.fill, torch.finfo(lse.dtype).min)
    return torch.full((), context_of(a.kv_cache, a.block_table), dtype=lse.dtype, device=lse.device).log() + scores


def asking_for_sums(a: Arguments) -> dict[str, Any]:
    return {"return_softmax_lse": True} if a.return_lse else {}


# --- over latents ----------------------------------------------------------------------------------------------------


def lower_latents(surface: Surface, a: Arguments) -> Compiled:
    if a.indices is not None:
        return sparse_flash_attention.lower(surface, a)
    if a.query_rope is None or a.kr_cache is None:
        raise NoMatch(f"query_rope is None; {KERNEL} takes absorbed queries with a rotary part")
    if a.sinks is not None:
        takes = f"{KERNEL} takes them for values of up to {EXPANDED} columns, not for latents of {RANK}"
        raise NoMatch(f"sinks are given; {takes}")
    refuse_others(a, KERNEL, *TAKES_OF_LATENTS)
    caches = [("kv_cache", a.kv_cache), ("kr_cache", a.kr_cache)]
    kernel.refuse_latent(surface, ("query", a.query), ("query_rope", a.query_rope), caches)
    tokens = a.query.shape[1]
    if not any(limits.known_equal(tokens, count) for count in range(1, LATENT_TOKENS + 1)):
        raise NoMatch(f"query has S = {tokens}; {KERNEL} takes 1 to {LATENT_TOKENS} tokens with absorbed queries")
    if surface.mode == "aclgraph":
        kernel.refuse_computed(surface, a)
    kernel.refuse_masks(surface, a, tokens)
    if a.block_table is not None:
        refuse_pages(surface, a.kv_cache, a.kr_cache)
    return attend_to_latents


def refuse_pages(surface: Surface, kv_cache: Tensor, kr_cache: Tensor) -> None:
    """Raises NoMatch for pages that the kernel cannot take. Plain pages may be cut, those in FRACTAL_NZ may not."""
    size = kv_cache.shape[-2]
    if is_nz(kv_cache):
        limits.fractals("kv_cache", kv_cache, KERNEL)
        limits.fractals("kr_cache", kr_cache, KERNEL)
        sizes = RULES[surface.cann].nz_pages
        limits.page_size("kv_cache in FRACTAL_NZ", size, limits.of_release(surface, KERNEL), sizes)
    elif page_size(size) is None:
        raise NoMatch(f"kv_cache has BlockSize = {size}; {KERNEL} takes multiples of {PAGE_SIZES[-1]}")
    limits.equally_many_blocks(KERNEL, kv_cache=kv_cache, kr_cache=kr_cache)


def attend_to_latents(surface: Surface, a: Arguments) -> Results:
    assert a.query_rope is not None and a.kr_cache is not None, "others are refused"
    batch, tokens, heads, _ = a.query.shape
    latents, keys, table = paged(a, a.kr_cache)
    visible = tokens if a.is_causal else context_of(a.kv_cache, a.block_table)
    lengths = kernel.lengths(a)
    out, sums = kernel.attend_and_sum(
        surface,
        a.query.contiguous(),
        latents,
        latents,
        query_rope=a.query_rope.contiguous(),
        key_rope=keys,
        actual_seq_kvlen=kernel.of_all(batch, lengths, visible, a.kv_cache.device),
        block_table=table,
        block_size=latents.shape[-2],
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=a.scale,
        input_layout="BSND",
        **kernel.rows(tokens, a.kv_cache.device),
        **asking_for_sums(a),
    )
    return results(a, out, sums.transpose(1, 2) if a.return_lse else sums, lengths)  # of the kernel, [B,N,S,1]


def paged(a: Arguments, kr_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages [BlockNum,BlockSize,D], or in FRACTAL_NZ [BlockNum,1,D/n0,BlockSize,n0], of latents and of rotary keys, and
    the page table int32 [B,Blocks] of both."""
    if is_nz(a.kv_cache):
        assert a.block_table is not None, "FRACTAL_NZ is a format of pages"
        table = from_start(a.block_table, a.kv_cache.shape[0]).to(torch.int32)
        return a.kv_cache.unsqueeze(1), kr_cache.unsqueeze(1), table
    batch, positions, _ = a.kv_cache.shape
    size = page_size(positions) or PAGE
    latents, keys = (in_whole_pages(cache, size) for cache in (a.kv_cache, kr_cache))
    blocks = latents.shape[1] // size
    if a.block_table is None:
        table = torch.arange(batch * blocks, dtype=torch.int32, device=a.kv_cache.device).view(batch, blocks)
    else:
        table = in_parts(from_start(a.block_table, batch), blocks)
    return latents.reshape(-1, size, latents.shape[2]), keys.reshape(-1, size, keys.shape[2]), table


def is_nz(cache: Tensor) -> bool:
    return cache.dim() == 4


def in_parts(block_table: Tensor, count: int) -> Tensor:
    """A table of blocks of `count` pages each, as a table of pages."""
    pages = block_table.unsqueeze(-1) * count + torch.arange(count, device=block_table.device)
    return pages.flatten(1).to(torch.int32)


def in_whole_pages(cache: Tensor, size: int) -> Tensor:
    """[B,T,D] padded so that T is a multiple of the page size.

    A cache that grows by a token per step is copied at each step anyway."""
    if page_size(cache.shape[1]) == size:
        return cache
    batch, positions, width = cache.shape
    missing = (size - positions % size) % size  # only positive operands: GE's modulo keeps the sign, Python's does not
    return torch.cat((cache, cache.new_zeros(batch, missing, width)), 1)


# --- of heads --------------------------------------------------------------------------------------------------------


def lower_heads(surface: Surface, a: Arguments) -> Compiled:
    kernel.refuse_chip(surface)
    if a.indices is not None:
        raise NoMatch(CHOSEN)
    if a.lens is not None:
        raise NoMatch(PACKED)
    refuse_others(a, KERNEL, *TAKES_OF_HEADS)
    if surface.mode == "aclgraph":
        raise NoMatch(f"keys are expanded; {KERNEL} takes them in the layout TND, which cannot be captured")
    kernel.refuse_packed(surface, "keys are expanded")
    refuse_sizes(a)
    limits.dtype("query", a.query, KERNEL, (torch.bfloat16,))
    if a.sinks is not None:
        limits.dtype("sinks", a.sinks, KERNEL, (torch.bfloat16,))
        limits.size("with sinks, weight_uv has Dv", a.weights[1].shape[1], KERNEL, (EXPANDED,))
    kernel.refuse_masks(surface, a, a.query.shape[1])
    return attend_to_heads


def refuse_sizes(a: Arguments) -> None:
    width, values = a.query.shape[3], a.weights[1].shape[1]
    if a.query_rope is None:
        what = "without a rotary part, query has D"
        limits.size(what, width, KERNEL, tuple(EXPANDED_UNROTATED))
        limits.size("weight_uv has Dv", values, KERNEL, EXPANDED_UNROTATED.get(width, (EXPANDED,)))
        return
    limits.size("query has D", width, KERNEL, (EXPANDED,))
    limits.size("weight_uv has Dv", values, KERNEL, (EXPANDED,))
    limits.size("query_rope has Dr", a.query_rope.shape[3], KERNEL, (ROPE,))


def attend_to_heads(surface: Surface, a: Arguments) -> Results:
    batch, tokens, heads, _ = a.query.shape
    positions = a.kv_cache.shape[1]
    latent, options = a.kv_cache.reshape(batch * positions, -1), asking_for_sums(a)
    key, value = (up(latent, weight) for weight in a.weights)
    seen = kernel.lengths(a)
    if seen is not None and a.mask is not None:
        seen = seen.clamp(min=tokens)  # the kernel wants as many keys as queries
    queries, keys = ends(a, seen)
    if a.sinks is not None:
        options["learnable_sink"] = a.sinks
    if a.query_rope is not None and a.kr_cache is not None:
        options["query_rope"] = a.query_rope.reshape(batch * tokens, heads, -1)
        options["key_rope"] = a.kr_cache.reshape(batch * positions, 1, -1).expand(-1, heads, -1).contiguous()
    out, sums = kernel.attend_and_sum(
        surface,
        a.query.reshape(batch * tokens, heads, -1),
        key,
        value,
        actual_seq_qlen=queries,
        actual_seq_kvlen=keys,
        num_query_heads=heads,
        num_key_value_heads=heads,
        softmax_scale=a.scale,
        input_layout="TND",
        **options,
        **kernel.rows(tokens, latent.device),
    )
    sums = sums.view(batch, tokens, heads, 1) if a.return_lse else sums
    return results(a, out.view(batch, tokens, heads, -1), sums, seen)


def ends(a: Arguments, seen: Tensor | None) -> tuple[Lengths, Lengths]:
    """The ends of queries and keys of all sequences, which lie one behind the other."""
    batch, tokens = a.query.shape[:2]
    positions, device = a.kv_cache.shape[1], a.kv_cache.device
    if seen is not None:
        return kernel.ends_of_parts(batch, tokens, seen, positions, device)
    if a.is_causal and not limits.known_equal(tokens, positions):
        return kernel.ends_of_parts(batch, tokens, tokens, positions, device)
    return kernel.ends(batch, tokens, device), kernel.ends(batch, positions, device)


def up(latent: Tensor, weight: Tensor) -> Tensor:
    """[B*T,Hckv], [N,D,Hckv] -> [B*T,N,D]."""
    heads, width, rank = weight.shape
    return (latent @ weight.reshape(heads * width, rank).t().contiguous()).view(-1, heads, width)
