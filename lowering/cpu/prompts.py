"""Attention of prompts by PyTorch's kernel, in parts: keys and values are expanded for a few heads of one sequence at
a time, and rows of queries read them up to the last key that one of them sees."""

from dataclasses import replace

from torch import Tensor

from mla_fx.ops.emitted.attention.arguments import Arguments, Results
from mla_fx.ops.emitted.attention.heads import joined
from mla_fx.ops.emitted.attention.operator import fake
from mla_fx.ops.emitted.attention.pages import unpaged, whole_mask
from mla_fx.ops.emitted.attention.parts import of_heads, of_sequences
from mla_fx.ops.emitted.attention.softmax import aligned
from mla_fx.ops.emitted.attention.tiles import attend, last_seen, mask_of_rows, parts, seen_keys

from . import heads_over_rows

KEYS = 2**22  # elements of keys that are expanded at a time; measured: memory is taken anew for larger ones
ROWS = 1024  # query tokens; measured: PyTorch's kernel takes a third longer per row with a quarter as many


def in_parts(a: Arguments) -> Results:
    """Compute the expanded form of attention without logarithms."""
    if heads_over_rows.is_fast(a):
        return heads_over_rows.attend(a)
    a, (out, no_sums) = unpaged(a), fake(a)
    a = replace(a, mask=_mask(a), context_lens=None, is_causal=False)
    for sequence in range(out.shape[0]):
        some = slice(sequence, sequence + 1)
        _of_sequence(of_sequences(a, some), out[some])
    return out, no_sums


def _mask(a: Arguments) -> Tensor | None:
    """[B or 1, N or 1, S or 1, T]"""
    mask = whole_mask(a)
    return None if mask is None else aligned(mask, rows_first=False).expand(-1, -1, -1, a.kv_cache.shape[1])


def _of_sequence(a: Arguments, out: Tensor) -> None:
    steps, heads, width = a.query.shape[1:]
    context, seen = a.kv_cache.shape[1], seen_keys(a.mask)
    tiles = [(first, last, _end(a, first, last)) for first, last in parts(steps, ROWS)]
    for first_head, last_head in parts(heads, max(1, KEYS // (context * width))):
        own = of_heads(a, slice(first_head, last_head))
        query, key, value = joined(own, seen)
        for first, last, end in tiles:
            shown = mask_of_rows(own.mask, first, last)
            shown = None if shown is None else shown[..., :end]
            given = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
            part = attend(*given, shown, own.scoring)
            out[:, first:last, first_head:last_head] = part.transpose(1, 2)


def _end(a: Arguments, first: int, last: int) -> int:
    """How many keys some rows read."""
    context = a.kv_cache.shape[1]
    return context if a.fill is not None else last_seen(mask_of_rows(a.mask, first, last), context)
