"""Attention of prompts under a mask, in parts: keys and values are expanded for a few heads at a time, and rows of
queries read them up to the last key that one of them sees."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from mla_fx.ops.emitted import mla_attention
from mla_fx.ops.emitted.attention import aligned, as_mask
from mla_fx.ops.emitted.mla_attention import Arguments, joined, unpaged
from mla_fx.ops.emitted.tiled_attention import attend, mask_of_rows, seen_keys

HEADS = 8
ROWS = 1024  # query tokens; measured: PyTorch's kernel takes a third longer per row with a quarter as many


def in_parts(a: Arguments) -> Tensor:
    """The same as the expanded form of mla_attention."""
    a, out = unpaged(a), mla_attention.fake(a)
    steps, heads = a.q_nope.shape[1:3]
    mask = _mask(a)
    seen, tiles = seen_keys(mask), [(*rows, _end(a, mask, *rows)) for rows in _parts(steps, ROWS)]
    for first_head, last_head in _parts(heads, HEADS):
        query, key, value = joined(_of_heads(a, first_head, last_head), seen)
        own = mask if mask is None or mask.shape[1] == 1 else mask[:, first_head:last_head]
        sinks = None if a.sinks is None else a.sinks[first_head:last_head]
        for first, last, end in tiles:
            shown = mask_of_rows(own, first, last)
            shown = None if shown is None else shown[..., :end]
            given = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
            part = attend(*given, shown, a.scale, False, a.fill, sinks)
            out[:, first:last, first_head:last_head] = part.transpose(1, 2)
    return out


def _parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, count)) for first in range(0, count, size))


def _mask(a: Arguments) -> Tensor | None:
    """[B or 1, N or 1, S or 1, T]"""
    context = a.kv_cache.shape[1]
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.q_nope, context)
    return None if mask is None else aligned(mask, rows_first=False).expand(-1, -1, -1, context)


def _end(a: Arguments, mask: Tensor | None, first: int, last: int) -> int:
    """The number of keys up to the last one that one of the rows sees, at least one."""
    seen = None if a.fill is not None else seen_keys(mask_of_rows(mask, first, last))
    if seen is None:
        return a.kv_cache.shape[1]
    places = seen.any(0).flatten().nonzero()
    return int(places[-1]) + 1 if len(places) else 1


def _of_heads(a: Arguments, first: int, last: int) -> Arguments:
    return replace(
        a,
        q_nope=a.q_nope[:, :, first:last],
        q_rope=None if a.q_rope is None else a.q_rope[:, :, first:last],
        weight_uk=a.weight_uk[first:last],
        weight_uv=a.weight_uv[first:last],
    )
