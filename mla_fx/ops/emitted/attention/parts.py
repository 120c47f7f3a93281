"""Parts of a call: some of its sequences, heads, or query tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from .arguments import Arguments
from .tiles import mask_of_rows


def of_sequences(a: Arguments, some: slice) -> Arguments:
    return replace(
        a,
        query=a.query[some],
        query_rope=None if a.query_rope is None else a.query_rope[some],
        kv_cache=a.kv_cache[some],
        kr_cache=None if a.kr_cache is None else a.kr_cache[some],
        mask=_of_mask(a.mask, 0, some),
        context_lens=_of(a.context_lens, 0, some),
    )


def of_packed(a: Arguments, some: slice, lens: list[int]) -> Arguments:
    """Some neighbours of packed sequences, which have these tokens."""
    query_rope, kr_cache = (None if value is None else value[:, some] for value in (a.query_rope, a.kr_cache))
    query, kv_cache = a.query[:, some], a.kv_cache[:, some]
    return replace(a, query=query, query_rope=query_rope, kv_cache=kv_cache, kr_cache=kr_cache, lens=lens)


def of_heads(a: Arguments, some: slice) -> Arguments:
    weight_uk, weight_uv = a.weights
    return replace(
        a,
        query=a.query[:, :, some],
        query_rope=None if a.query_rope is None else a.query_rope[:, :, some],
        weight_uk=weight_uk[some],
        weight_uv=weight_uv[some],
        mask=_of_mask(a.mask, 1, some),
        sinks=None if a.sinks is None else a.sinks[some],
    )


def of_tokens(a: Arguments, first: int, last: int) -> Arguments:
    """Tokens before the last one see fewer keys, and so their lengths are smaller."""
    lens = None if a.context_lens is None else a.context_lens - (a.query.shape[1] - last)
    return replace(
        a,
        query=a.query[:, first:last],
        query_rope=None if a.query_rope is None else a.query_rope[:, first:last],
        mask=mask_of_rows(a.mask, first, last),
        context_lens=a.query.new_full((1,), last, dtype=torch.int64) if a.is_causal else lens,
        indices=None if a.indices is None else a.indices[:, first:last],
        is_causal=False,
    )


def _of_mask(mask: Tensor | None, dim: int, some: slice) -> Tensor | None:
    """The part along a dimension of [B, N, S, T], which a mask may lack."""
    return mask if mask is None or mask.dim() < 4 - dim else _of(mask, mask.dim() - 4 + dim, some)


def _of(value: Tensor | None, dim: int, some: slice) -> Tensor | None:
    """A part of what may be the same along a dimension."""
    if value is None or value.shape[dim] == 1:
        return value
    return value.narrow(dim, some.start, some.stop - some.start)
