"""Rows are written into caches at addresses: offsets of elements in the memory of a cache, which is flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BYTES_OF_A_FRACTAL = 32  # of the last dimension of FRACTAL_NZ


def write(cache: Tensor, slots: Tensor, rows: Tensor, addresses: Tensor) -> None:
    """Write rows [T, N, D] at addresses of that shape. A row with a negative slot is left out."""
    kept = slots >= 0
    memory(cache)[addresses[kept]] = rows[kept]


def memory(cache: Tensor) -> Tensor:
    """All of a cache from its first element on, gaps included, as one dimension."""
    if not cache.numel():
        return cache.view(-1)
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((last + 1,), (1,))


# --- addresses ----------------------------------------------------------------------------------------------------


def in_pages(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows [T, N, D] of a cache [blocks, size, N, D], whose pages may be apart."""
    _, size, heads, width = _checked(cache, slots)
    page, offset = _rows(slots // size), _rows(slots % size)
    head, column = _heads_and_columns(heads, width)
    return page * cache.stride(0) + (offset * heads + head) * width + column


def in_nz_pages(cache: Tensor, slots: Tensor) -> Tensor:
    """Rows [T, N, D] of a cache of the same shape, whose pages have the memory of [N, D/d0, size, d0]."""
    _, size, heads, width = _checked(cache, slots)
    _refuse_gaps(cache)
    fractal = BYTES_OF_A_FRACTAL // cache.element_size()
    page, offset = _rows(slots // size), _rows(slots % size)
    head, column = _heads_and_columns(heads, width)
    block = (page * heads + head) * (width // fractal) + column // fractal
    return (block * size + offset) * fractal + column % fractal


def in_sequences(cache: Tensor, positions: Tensor) -> Tensor:
    """Rows [B*S, N, D] of a cache [B, N, L, D], for positions [B, S]."""
    batch, heads, length, width = cache.shape
    _refuse_gaps(cache)
    _refuse_behind(positions, length)
    sequence = torch.arange(batch).unsqueeze(-1).expand_as(positions)
    head, column = _heads_and_columns(heads, width)
    return ((_rows(sequence) * heads + head) * length + _rows(positions)) * width + column


def in_order(cache: Tensor, tokens: int) -> Tensor:
    """Rows [T, 1, D] of a cache that is the rows of all tokens."""
    _refuse_gaps(cache)
    width = cache.shape[-1]
    if cache.numel() != tokens * width:
        raise ValueError(f"a cache is {list(cache.shape)}; without an index it has a row for each of {tokens} tokens")
    return _rows(torch.arange(tokens)) * width + torch.arange(width)


# --- slots --------------------------------------------------------------------------------------------------------


def slots_of_blocks(blocks: Tensor, lengths: Sequence[int], size: int) -> Tensor:
    """The slots of tokens whose sequences fill blocks of their own, in order. A negative block skips its tokens."""
    slots: list[int] = []
    given = iter(blocks.flatten().tolist())
    for length in lengths:
        for first in range(0, length, size):
            block, count = next(given), min(size, length - first)
            slots += [block * size + offset if block >= 0 else -1 for offset in range(count)]
    return torch.tensor(slots, dtype=torch.int64)


def _rows(values: Tensor) -> Tensor:
    """[T, 1, 1]."""
    return values.reshape(-1, 1, 1)


def _heads_and_columns(heads: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.arange(heads).unsqueeze(-1), torch.arange(width)


def _checked(cache: Tensor, slots: Tensor) -> torch.Size:
    if cache.ndim != 4 or not cache[:1].is_contiguous():
        raise ValueError(f"a cache is {list(cache.shape)} with strides {cache.stride()}; it is pages that are dense")
    _refuse_behind(slots, cache.shape[0] * cache.shape[1])
    return cache.shape


def _refuse_behind(slots: Tensor, count: int) -> None:
    """Kernels check nothing, and would write memory of others. Into an empty cache they write nothing."""
    if count and slots.numel() and int(slots.max()) >= count:
        raise ValueError(f"slot {int(slots.max())} is behind the end of a cache of {count}")


def _refuse_gaps(cache: Tensor) -> None:
    if not cache.is_contiguous():
        raise ValueError(f"a cache has strides {cache.stride()}; in this cache mode its memory is dense")
