"""Writes rows into caches: per batch, in pages, and in pages of the FRACTAL_NZ format.

A page [BlockSize, 1, width] of an NZ cache holds the bytes of [width/n0, BlockSize, n0], where n0 elements take 32
bytes. Its torch shape is that of a plain page. In cache_mode "NZ" the shape is that of the bytes, for any n0.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .sizes import statically_known_true

Record = TypeVar("Record")


def store(cache: Tensor, index: Tensor | None, rows: Tensor, cache_mode: str, *, in_place: bool = False) -> Tensor:
    """Return the cache with `rows` at `index`, as a new tensor unless `in_place`; see `_addressed`. Without an index,
    the rows are the new cache."""
    if index is None:
        rows = rows.unsqueeze(-2)
        return cache.copy_(rows) if in_place else rows.clone(memory_format=torch.contiguous_format)
    grid = as_nz(cache) if cache_mode in ("PA_NZ", "PA_BLK_NZ") else cache
    put = torch.ops.aten.index_put_.default if in_place else torch.ops.aten.index_put.default
    updated: Tensor = put(grid, *_addressed(grid, index, rows, cache_mode))
    return updated if grid is cache else updated.view(cache.shape)


def like_store(cache: Tensor, index: Tensor | None) -> Tensor:
    """Return what `store` returns, uninitialised."""
    if index is None:
        return torch.empty_like(cache, memory_format=torch.contiguous_format)
    return torch.empty_like(cache)


def page_count(steps: int, block_size: int) -> int:
    """Ceil(S / BlockSize)."""
    return (steps + block_size - 1) // block_size


def page_slots(pages: Tensor, batch: int, steps: int, block_size: int) -> Tensor:
    """Return the slots [B, S] of tokens that fill whole pages in order; any slot of a page may name it in `pages`.

    `pages` [B*Ceil(S/BlockSize)] lists the pages of one batch row after another. A negative page skips its tokens.
    """
    step = torch.arange(steps, device=pages.device)
    first = torch.arange(batch, device=pages.device).unsqueeze(-1) * page_count(steps, block_size)
    page = pages[first + step // block_size]
    return torch.where(page < 0, page, page // block_size * block_size + step % block_size)


def ragged_page_slots(starts: Tensor, ends: Tensor, tokens: int, block_size: int) -> Tensor:
    """Like `page_slots`, for T tokens of sequences that end at `ends` [B]; each sequence starts a new page.

    `starts` [sum of Ceil(S_b/BlockSize)] holds the first slots of the pages, sequence by sequence.
    """
    ends = ends.to(starts.device, torch.int64)
    lengths = ends.diff(prepend=ends.new_zeros(1))
    pages = (lengths + block_size - 1) // block_size
    token = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(ends, token, right=True)
    step = token - (ends - lengths)[sequence]
    start = starts[(pages.cumsum(0) - pages)[sequence] + step // block_size]
    return torch.where(start < 0, start, start + step % block_size)


def as_nz(cache: Tensor) -> Tensor:
    """[BlockNum, width/n0, BlockSize, n0]: the same memory as the NZ cache [BlockNum, BlockSize, 1, width]."""
    blocks, block_size, _, width = cache.shape
    fractal = 32 // cache.element_size()
    return cache.view(blocks, width // fractal, block_size, fractal)


def from_nz(cache: Tensor) -> Tensor:
    """[BlockNum, BlockSize, 1, width]: the same memory as [BlockNum, width/n0, BlockSize, n0]."""
    blocks, bands, block_size, fractal = cache.shape
    return cache.view(blocks, block_size, 1, bands * fractal)


def page_shape(cache: Tensor) -> Tensor:
    """The same, to look at its shape only: a view of symbolic sizes would add guards."""
    blocks, bands, block_size, fractal = cache.shape
    width = bands * fractal
    return cache.as_strided((blocks, block_size, 1, width), (cache.stride(0), width, width, 1))


def of_pages(a: Record, *caches: str, form: Callable[[Tensor], Tensor] = from_nz) -> Record:
    """A call in cache_mode "NZ" as the same one in "PA_NZ"."""
    pages: dict[str, Any] = {name: form(getattr(a, name)) for name in caches}
    return replace(a, **pages, cache_mode="PA_NZ")  # type: ignore[type-var]  # arguments are dataclasses


def _addressed(grid: Tensor, index: Tensor, rows: Tensor, cache_mode: str) -> tuple[list[Tensor | None], Tensor]:
    """Compute which values to write where, so that one index_put stores every row and skips negative indices.

    Norm: cache [B, 1, T, width], rows [B, S, width], index [B or 1, S] within each batch row. Otherwise: cache
    [BlockNum, BlockSize, 1, width], rows [..., width], index of any shape over all slots.
    """
    if cache_mode == "Norm":
        index = index.expand(rows.shape[:-1])
    else:
        index, rows = index.flatten(), rows.flatten(0, -2)
    values = _values(grid, rows, cache_mode)
    if statically_known_true(grid.numel() == 0):
        index, values = index[..., :0], values.narrow(index.dim() - 1, 0, 0)
    elif not statically_known_true(index.numel() == 0):
        index, values = _skip_negative(grid, index, values, cache_mode)
    return _address(grid, index, cache_mode), values


def _values(grid: Tensor, rows: Tensor, cache_mode: str) -> Tensor:
    """Return each row in the shape that it has in the cache."""
    if cache_mode.endswith("NZ"):
        return rows.view(*rows.shape[:-1], grid.shape[1], grid.shape[3])
    return rows.unsqueeze(-2)


def _address(grid: Tensor, index: Tensor, cache_mode: str) -> list[Tensor | None]:
    if cache_mode == "Norm":
        return [torch.arange(grid.shape[0], device=grid.device).unsqueeze(-1), None, index]
    if cache_mode.endswith("NZ"):
        return [index // grid.shape[2], None, index % grid.shape[2]]
    return [index // grid.shape[1], index % grid.shape[1]]


def _skip_negative(grid: Tensor, index: Tensor, values: Tensor, cache_mode: str) -> tuple[Tensor, Tensor]:
    """Let each skipped token repeat the first stored one: equal writes to one slot change nothing.

    If no token is stored, they rewrite slot 0 with its own content.
    """
    stored = index >= 0
    first = stored.int().argmax(-1, keepdim=True)
    spare = index.gather(-1, first).clamp(min=0)
    old = torch.ops.aten.index.Tensor(grid, _address(grid, spare, cache_mode))
    repeated = values.gather(index.dim() - 1, first[..., None, None].expand(*first.shape, *values.shape[-2:]))
    filler = torch.where(stored.any(-1, keepdim=True)[..., None, None], repeated, old)
    return torch.where(stored, index, spare), torch.where(stored[..., None, None], values, filler)
