"""Attention over latents by FusedInferAttentionScore over pages: queries [B,S,N,512] and [B,S,N,64], one key head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import HIDING, Arguments, Results, refuse_others
from mla_fx.ops.emitted.attention.pages import READS_PAGES, context_of
from mla_fx.ops.emitted.attention.softmax import fake_sums
from mla_fx.target import Compiled

from ... import fused_infer_attention_score as kernel
from ... import limits
from ...causal_masks import checked
from ...fused_infer_attention_score import EXPANDED, KERNEL, LATENT_TOKENS, RANK, RULES
from ...limits import Surface
from ...prolog_form import PAGE_SIZES, page_size
from ..lightning_index import from_start
from . import sparse_flash_attention

PAGE = 128  # tokens of a page, if the cache does not determine it
TAKES = (*HIDING, "fill", "block_table", "return_lse")


def refuse_body(a: Arguments) -> None:
    if a.indices is None and a.block_table is not None:
        raise NoMatch(READS_PAGES)


def lower(surface: Surface, a: Arguments) -> Compiled:
    if a.indices is not None:
        return sparse_flash_attention.lower(surface, a)
    if a.query_rope is None or a.kr_cache is None:
        raise NoMatch(f"query_rope is None; {KERNEL} takes absorbed queries with a rotary part")
    if a.sinks is not None:
        takes = f"{KERNEL} takes them for values of up to {EXPANDED} columns, not for latents of {RANK}"
        raise NoMatch(f"sinks are given; {takes}")
    refuse_others(a, KERNEL, *TAKES)
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
    return attention


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
    blocks, others = kv_cache.shape[0], kr_cache.shape[0]
    if not limits.holds(blocks == others):
        takes = f"{KERNEL} takes one table, for caches with equal numbers of blocks"
        raise NoMatch(f"kv_cache has {blocks} blocks and kr_cache {others}; {takes}")


def attention(surface: Surface, a: Arguments) -> Results:
    """[B,S,N,512] and [B,S,N]."""
    if not a.return_lse:
        return attend(surface, a)[0], fake_sums(a.query, a.return_lse)
    out, lse = attend(surface, a, return_softmax_lse=True)
    return out, logarithms(a, lse.transpose(1, 2), kernel.lengths(a))  # of the kernel, [B,N,S,1]


def attend(surface: Surface, a: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    """[B,S,N,512], and the kernel's sums."""
    assert a.query_rope is not None and a.kr_cache is not None, "others are refused"
    batch, tokens = a.query.shape[:2]
    latents, keys, table = paged(a, a.kr_cache)
    device = a.kv_cache.device
    visible = tokens if a.is_causal else context_of(a.kv_cache, a.block_table)
    lengths = kernel.lengths(a)
    out, lse = kernel.attend_and_sum(
        surface,
        a.query.contiguous(),
        latents,
        latents,
        query_rope=a.query_rope.contiguous(),
        key_rope=keys,
        actual_seq_kvlen=kernel.equal(batch, visible, device) if lengths is None else lengths.expand(batch),
        block_table=table,
        block_size=latents.shape[-2],
        num_query_heads=a.query.shape[2],
        num_key_value_heads=1,
        softmax_scale=a.scale,
        input_layout="BSND",
        **kernel.rows(tokens, device),
        **options,
    )
    return checked(out, a.mask, lengths), lse


def logarithms(a: Arguments, lse: Tensor, lengths: Tensor | None) -> Tensor:
    """The kernel's, [B,S,N,1] as [B,S,N], for the lengths that it got. Plus infinity marks a row that sees no key."""
    lse = torch.where(lse == torch.inf, of_hidden_scores(a, lse), lse)
    return checked(lse, a.mask, lengths).squeeze(-1)


def of_hidden_scores(a: Arguments, lse: Tensor) -> Tensor | float:
    """Return the log-sum-exp of a row in which all scores are hidden."""
    if a.fill is None:
        return -torch.inf
    scores = max(a.fill, torch.finfo(lse.dtype).min)
    return torch.full((), context_of(a.kv_cache, a.block_table), dtype=lse.dtype, device=lse.device).log() + scores


def paged(a: Arguments, kr_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pages [BlockNum,BlockSize,D], or in FRACTAL_NZ [BlockNum,1,D/n0,BlockSize,n0], of latents and of rotary keys, and
    the page table int32 [B,Blocks] of both."""
    if is_nz(a.kv_cache):
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
