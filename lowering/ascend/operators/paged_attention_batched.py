"""Lowers paged_attention.batched to FusedInferAttentionScore over pages: queries [B,S,N,D], pages [BlockNum,BlockSize,
Nkv*D]; or queries [B,N,S,D], pages [BlockNum,Nkv,BlockSize,D], if heads come first in memory.

A single token of each sequence is decoded (incre_flash_attention in CANN's sources, pages in steps of 16); several
tokens are a prompt (prompt_flash_attention, pages in steps of 128).

Codes in int8 are decoded only: pages in steps of 32, with scales and offsets [1,Nkv,D] in the dtype of the query. The
kernel multiplies queries and sums by scales in float32, as if keys and values were not rounded."""

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import arguments
from mla_fx.ops.emitted.attention.pages import READS_PAGES, from_start
from mla_fx.ops.emitted.paged_attention import Arguments
from mla_fx.target import Compiled

from .. import fused_infer_attention_score as kernel
from .. import limits
from ..causal_masks import checked
from ..fused_infer_attention_score import KERNEL
from ..limits import Surface
from ..prolog_form import PAGE_SIZES, page_size
from .attention import in_parts

OPERATOR = "paged_attention.batched"
CHANNELS = ("key_scale", "value_scale", "key_offset", "value_offset")


def refuse_body(a: Arguments) -> None:
    raise NoMatch(READS_PAGES)


def lower(surface: Surface, a: Arguments) -> Compiled:
    kernel.refuse_chip(surface)
    limits.dtype("query", a.query, KERNEL, limits.HALVES)
    refuse_heads(a.query, a.key_cache, a.value_cache)
    stored = torch.int8 if has_codes(a) else a.query.dtype
    for name, cache in caches(a).items():
        limits.dtype(name, cache, KERNEL, (stored,))
    if has_codes(a):
        refuse_codes(a)
    if not has_heads_first(a):
        for name, cache in caches(a).items():
            limits.dense(name, cache, KERNEL)
    refuse_pages(a)
    if surface.mode == "aclgraph":
        kernel.refuse_computed(surface, one_headed(a))
    kernel.refuse_masks(surface, one_headed(a), a.query.shape[1])
    return plain


def refuse_heads(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises NoMatch for heads of queries [...,N,D] and of pages [BlockNum,BlockSize,Nkv,D] that the kernel does not
    take: CheckInputQKVTypeMatch of incre_flash_attention, SetTilingHeadNumRatio and checkPAKeyValueDimsWhenBBH of
    prompt_flash_attention."""
    heads, width, kv_heads = query.shape[-2], query.shape[-1], key_cache.shape[2]
    limits.size("query has D", width, KERNEL, kernel.HEAD_SIZES)
    limits.size("value_cache has Dv", value_cache.shape[3], KERNEL, (width,))
    if not limits.holds(heads <= kernel.GROUP * kv_heads):
        takes = f"{KERNEL} takes up to {kernel.GROUP} for each of key_cache"
        raise NoMatch(f"query has {heads} heads and key_cache {kv_heads}; {takes}")
    if not limits.holds(heads <= kernel.MOST_HEADS):
        raise NoMatch(f"query has {heads} heads; {KERNEL} takes up to {kernel.MOST_HEADS}")
    if not limits.holds(kv_heads * width <= kernel.MOST_COLUMNS):
        columns = f"key_cache has {kv_heads} heads of {width} columns"
        raise NoMatch(f"{columns}; {KERNEL} takes up to {kernel.MOST_COLUMNS} together")


def caches(a: Arguments) -> dict[str, Tensor]:
    return {"key_cache": a.key_cache, "value_cache": a.value_cache}


def has_codes(a: Arguments) -> bool:
    return torch.int8 in (a.key_cache.dtype, a.value_cache.dtype)


def refuse_codes(a: Arguments) -> None:
    tokens = a.query.shape[1]
    if not limits.known_equal(tokens, 1):
        raise NoMatch(f"key_cache has codes and query S = {tokens}; {KERNEL} takes codes with a single token")
    limits.size("with codes, query has D", a.query.shape[3], KERNEL, kernel.CODED_HEAD_SIZES)
    for name in CHANNELS:
        if (given := getattr(a, name)) is not None:
            limits.dtype(name, given, KERNEL, (a.query.dtype,))


def has_heads_first(a: Arguments) -> bool:
    """Whether the pages of both caches are [Nkv,BlockSize,D] in memory, and not [BlockSize,Nkv,D]."""
    return all(limits.is_dense(cache.transpose(1, 2)) and not limits.is_dense(cache) for cache in caches(a).values())


def refuse_pages(a: Arguments) -> None:
    positions, sizes = a.key_cache.shape[1], page_sizes(a)
    given = "codes" if has_codes(a) else f"S = {a.query.shape[1]}"
    what = f"with {given}, key_cache has BlockSize = {positions}"
    if page_size(positions, sizes) is None:
        raise NoMatch(f"{what}; {KERNEL} takes multiples of {sizes[-1]}")
    if has_heads_first(a) and not limits.holds(positions <= kernel.HEAD_PAGES[-1]):
        raise NoMatch(f"{what}; {KERNEL} takes up to {kernel.HEAD_PAGES[-1]} if heads come first in a page")
    limits.equally_many_blocks(KERNEL, **caches(a))


def page_sizes(a: Arguments) -> tuple[int, ...]:
    """Return the sizes of pages that the kernel takes with this number of tokens; a larger block is several pages."""
    sizes = kernel.CODED_PAGE_SIZES if has_codes(a) else PAGE_SIZES
    return sizes if limits.known_equal(a.query.shape[1], 1) else sizes[:1]


def one_headed(a: Arguments) -> arguments.Arguments:
    """The contexts and masks of a call, in the record that the rules of the kernel read."""
    keys = a.key_cache.flatten(2)
    return arguments.Arguments(
        a.query, None, keys, None, a.mask, a.context_lens, None, a.block_table, scale=a.scale, fill=a.fill
    )


def plain(surface: Surface, a: Arguments) -> Tensor:
    """[B,S,N,D]."""
    batch, tokens, heads, _ = a.query.shape
    device, heads_first = a.query.device, has_heads_first(a)
    blocks, positions, kv_heads, _ = a.key_cache.shape
    size = positions if heads_first else page_size(positions, page_sizes(a))
    assert size is not None, "other blocks are refused"
    context = a.block_table.shape[1] * positions
    lengths = kernel.lengths(one_headed(a))
    out = kernel.attend(
        surface,
        turned(a.query, heads_first).contiguous(),
        pages(a.key_cache, size, heads_first),
        pages(a.value_cache, size, heads_first),
        actual_seq_kvlen=kernel.of_all(batch, lengths, context, device),
        block_table=in_parts(from_start(a.block_table, blocks), positions // size),
        block_size=size,
        num_query_heads=heads,
        num_key_value_heads=kv_heads,
        softmax_scale=a.scale,
        input_layout="BNSD" if heads_first else "BSND",
        **(channels(a) if has_codes(a) else {}),
        **kernel.rows(tokens, device),
    )
    return checked(turned(out, heads_first), a.mask, lengths)


def channels(a: Arguments) -> dict[str, Tensor]:
    """Scales and offsets [1,Nkv,D] of both caches. The kernel takes offsets of both, or of neither."""
    scales = {"dequant_scale_key": a.key_scale, "dequant_scale_value": a.value_scale}
    offsets = {"dequant_offset_key": a.key_offset, "dequant_offset_value": a.value_offset}
    has_offsets = any(offset is not None for offset in offsets.values())
    sizes = a.key_cache.shape[2:]
    given = {name: a.query.new_ones(sizes) if scale is None else scale for name, scale in scales.items()}
    if has_offsets:
        given |= {name: a.query.new_zeros(sizes) if offset is None else offset for name, offset in offsets.items()}
    return {name: numbers.unsqueeze(0).contiguous() for name, numbers in given.items()}


def turned(rows: Tensor, heads_first: bool) -> Tensor:
    """Between [B,S,N,D] and [B,N,S,D]."""
    return rows.transpose(1, 2) if heads_first else rows


def pages(cache: Tensor, size: int, heads_first: bool) -> Tensor:
    """A block is a page if its heads come first, else as many pages as it has room for."""
    return cache.transpose(1, 2) if heads_first else cache.reshape(-1, size, cache.shape[2] * cache.shape[3])
