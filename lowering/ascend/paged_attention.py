"""Lowers the base scenario of paged_attention, in either layout or compressed, to FusedInferAttentionScore.

Compressed, each key head of a token has a table and a length of its own: the kernel takes it as a sequence.

ATB's own operators in torch_npu have neither a converter to GE nor a fake kernel, so no graph can contain them."""

from __future__ import annotations

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.vendor.paged_attention.arguments import Arguments
from mla_fx.ops.vendor.paged_attention.options import (
    BNSD,
    DECODING,
    DEQUANT_FUSION,
    KVHEAD_ROPE,
    PLAIN_SCALE,
    UNCOMPRESSED,
    UNMASKED,
    UNQUANTIZED,
    read_options,
)
from mla_fx.target import Compiled

from . import limits
from .fused_infer_attention_score import KERNEL, attend_to_pages, refuse_chip
from .fused_infer_attention_score_rules import GROUP, HEAD_PAGES, HEAD_SIZES, MOST_COLUMNS, MOST_HEADS
from .surface import Surface

OPERATOR = "paged_attention"
NO_GRAPH = f"torch.ops.atb._npu_paged_attention has no fake kernel, and {KERNEL}, which has one, takes"

# The value of each enumerator in the base scenario.
BASE = {
    "mask_type": UNMASKED,
    "quant_type": UNQUANTIZED,
    "calc_type": DECODING,
    "scale_type": PLAIN_SCALE,
}


def lower(surface: Surface, a: Arguments) -> Compiled:
    refuse_scenario(a)
    refuse_chip(surface)
    limits.dtype("query", a.query, KERNEL, limits.HALVES)
    refuse_sizes(a)
    refuse_lengths(a)
    for name in ("key_cache", "value_cache"):
        limits.dense(name, getattr(a, name), KERNEL)
    return plain


def refuse_scenario(a: Arguments) -> None:
    options = read_options(a)
    if options.quant == DEQUANT_FUSION:
        raise NoMatch(f"quant_type is {options.quant!r}, with float32 scales; {NO_GRAPH} scales in the dtype of query")
    chosen = (options.mask, options.quant, options.calc, options.scale)
    for (name, wanted), value in zip(BASE.items(), chosen, strict=True):
        if value != wanted:
            raise NoMatch(f"{name} is {value!r}; {NO_GRAPH} {wanted!r}")
    if options.compress == KVHEAD_ROPE:
        raise NoMatch(f"compress_type is {options.compress!r}; {NO_GRAPH} no numbers that are added to scores")
    if options.nz:
        raise NoMatch(f"the caches are NZ; {NO_GRAPH} plain ones here")
    if a.value_cache is None:
        raise NoMatch(f"value_cache is None; {NO_GRAPH} keys and values in two caches")
    if a.q_scale not in (0.0, 1.0):
        raise NoMatch(f"q_scale is {a.q_scale}; {NO_GRAPH} no scale of the query")


def refuse_lengths(a: Arguments) -> None:
    """Raises NoMatch if a sequence may have no context: it has no query row, but the kernel expects one."""
    given: object = a.context_lens
    if isinstance(given, Tensor):
        raise NoMatch(f"context_lens is a tensor, which may hold 0; {NO_GRAPH} a context for each row of query")
    rows = queries(a).shape[0]
    if not limits.holds(rows == len(a.context_lens)):
        counts = f"query has {rows} rows and context_lens {len(a.context_lens)}"
        raise NoMatch(f"{counts}; {NO_GRAPH} equally many")
    if not all(limits.holds(length > 0) for length in a.context_lens):
        raise NoMatch(f"context_lens is {given}, which may hold 0; {NO_GRAPH} a context for each row of query")


def refuse_sizes(a: Arguments) -> None:
    assert a.value_cache is not None, "a combined cache was refused"
    turn = 1, (2 if has_heads_first(a) else 1)
    refuse_heads(queries(a), a.key_cache.transpose(*turn), a.value_cache.transpose(*turn))
    limits.page_size("key_cache", block_size(a), KERNEL, HEAD_PAGES)


def queries(a: Arguments) -> Tensor:
    """[T,N,D] of sequences with a table each."""
    options = read_options(a)
    return a.query if options.compress == UNCOMPRESSED else a.query.reshape(-1, options.group, a.query.shape[2])


def has_heads_first(a: Arguments) -> bool:
    """Whether pages are [Nkv,BlockSize,D], and not [BlockSize,Nkv,D]."""
    return read_options(a).layout == BNSD


def block_size(a: Arguments) -> int:
    return a.key_cache.shape[2 if has_heads_first(a) else 1]


def refuse_heads(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises NoMatch for heads of queries [...,N,D] and of pages [BlockNum,BlockSize,Nkv,D] that the kernel does not
    take: CheckInputQKVTypeMatch of incre_flash_attention, SetTilingHeadNumRatio and checkPAKeyValueDimsWhenBBH of
    prompt_flash_attention."""
    heads, width, kv_heads = query.shape[-2], query.shape[-1], key_cache.shape[2]
    limits.size("query has D", width, KERNEL, HEAD_SIZES)
    limits.size("value_cache has Dv", value_cache.shape[3], KERNEL, (width,))
    if not limits.holds(heads <= GROUP * kv_heads):
        takes = f"{KERNEL} takes up to {GROUP} for each of key_cache"
        raise NoMatch(f"query has {heads} heads and key_cache {kv_heads}; {takes}")
    if not limits.holds(heads <= MOST_HEADS):
        raise NoMatch(f"query has {heads} heads; {KERNEL} takes up to {MOST_HEADS}")
    if not limits.holds(kv_heads * width <= MOST_COLUMNS):
        columns = f"key_cache has {kv_heads} heads of {width} columns"
        raise NoMatch(f"{columns}; {KERNEL} takes up to {MOST_COLUMNS} together")


def plain(surface: Surface, a: Arguments) -> Tensor:
    assert a.value_cache is not None, "a combined cache was refused"
    heads_first = has_heads_first(a)
    keys, values = (cache if heads_first else cache.flatten(2) for cache in (a.key_cache, a.value_cache))
    out, _ = attend_to_pages(
        surface,
        queries(a),
        keys,
        values,
        a.block_tables,
        a.context_lens,
        heads_first=heads_first,
        softmax_scale=a.qk_scale,
        block_size=block_size(a),
        num_key_value_heads=a.key_cache.shape[1 if heads_first else 2],
    )
    return out.reshape(*a.query.shape[:2], -1)
