"""Attention of prompts by PyTorch's kernel, in parts: keys and values are expanded for a few heads of one sequence at
a time, and rows of queries read them up to the last key that one of them sees."""

from dataclasses import replace

from torch import Tensor

from mla_fx.ops.emitted import mla_attention
from mla_fx.ops.emitted.attention import aligned, as_mask
from mla_fx.ops.emitted.mla_attention import Arguments, joined, unpaged
from mla_fx.ops.emitted.tiled_attention import attend, mask_of_rows, parts, seen_keys

from . import heads_over_rows

KEYS = 2**22  # elements of keys that are expanded at a time; measured: memory is taken anew for larger ones
ROWS = 1024  # query tokens; measured: PyTorch's kernel takes a third longer per row with a quarter as many


def in_parts(a: Arguments) -> Tensor:
    """The same as the expanded form of mla_attention."""
    if heads_over_rows.is_fast(a):
        return heads_over_rows.attend(a)
    a, out = unpaged(a), mla_attention.fake(a)
    mask = _mask(a)
    for sequence in range(out.shape[0]):
        own = mask if mask is None or mask.shape[0] == 1 else mask[sequence : sequence + 1]
        _of_sequence(_cut(a, 0, sequence, sequence + 1), own, out[sequence : sequence + 1])
    return out


def _of_sequence(a: Arguments, mask: Tensor | None, out: Tensor) -> None:
    steps, heads, width = a.q_nope.shape[1:]
    seen, tiles = seen_keys(mask), [(*rows, _end(a, mask, *rows)) for rows in parts(steps, ROWS)]
    for first_head, last_head in parts(heads, max(1, KEYS // (a.kv_cache.shape[1] * width))):
        query, key, value = joined(_cut(a, 2, first_head, last_head), seen)
        own = mask if mask is None or mask.shape[1] == 1 else mask[:, first_head:last_head]
        sinks = None if a.sinks is None else a.sinks[first_head:last_head]
        for first, last, end in tiles:
            shown = mask_of_rows(own, first, last)
            shown = None if shown is None else shown[..., :end]
            given = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
            part = attend(*given, shown, a.scale, False, a.fill, sinks)
            out[:, first:last, first_head:last_head] = part.transpose(1, 2)


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


def _cut(a: Arguments, dim: int, first: int, last: int) -> Arguments:
    """The same for some sequences, dimension 0, or some heads, dimension 2."""
    part, count = slice(first, last), last - first
    q_rope = None if a.q_rope is None else a.q_rope.narrow(dim, first, count)
    a = replace(a, q_nope=a.q_nope.narrow(dim, first, count), q_rope=q_rope)
    if dim == 2:
        return replace(a, weight_uk=a.weight_uk[part], weight_uv=a.weight_uv[part])
    kr_cache = None if a.kr_cache is None else a.kr_cache[part]
    return replace(a, kv_cache=a.kv_cache[part], kr_cache=kr_cache)
