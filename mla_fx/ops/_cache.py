"""Writes rows of latents into paged or per-batch caches."""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def store(cache: Tensor, index: Tensor | None, rows: Tensor, cache_mode: str) -> Tensor:
    """The cache with `rows` at `index`, as a new tensor; see `_place`. Without index the rows are the new cache."""
    if index is None:
        return rows.unsqueeze(-2).clone(memory_format=torch.contiguous_format)
    where, values = _place(cache, index, rows, paged=cache_mode != "Norm")
    updated: Tensor = torch.ops.aten.index_put.default(cache, where, values)
    return updated


def store_(cache: Tensor, index: Tensor | None, rows: Tensor, cache_mode: str) -> None:
    """As `store`, into the cache itself."""
    if index is None:
        cache.copy_(rows.unsqueeze(-2))
        return
    where, values = _place(cache, index, rows, paged=cache_mode != "Norm")
    torch.ops.aten.index_put_.default(cache, where, values)


def like_store(cache: Tensor, index: Tensor | None) -> Tensor:
    """What `store` returns, uninitialised."""
    if index is None:
        return torch.empty_like(cache, memory_format=torch.contiguous_format)
    return torch.empty_like(cache)


def _place(cache: Tensor, index: Tensor, rows: Tensor, paged: bool) -> tuple[list[Tensor | None], Tensor]:
    """Where in the cache to put which values, such that one index_put stores every row and skips negative indices.

    Paged: cache [BlockNum, BlockSize, 1, width], index of any shape over all slots. Otherwise: cache
    [B, 1, T, width], index [B or 1, S] inside each batch row. `rows` is [B, S, width], or [T, width] when paged.
    """
    if paged:
        index, rows = index.flatten(), rows.flatten(0, -2)
    else:
        index = index.expand(rows.shape[:-1])
    if statically_known_true(cache.numel() == 0):
        index, rows = index[..., :0], rows[..., :0, :]
    elif not statically_known_true(index.numel() == 0):
        index, rows = _skip_negative(cache, index, rows, paged)
    return _address(cache, index, paged), rows.unsqueeze(-2)


def _address(cache: Tensor, index: Tensor, paged: bool) -> list[Tensor | None]:
    if paged:
        return [index // cache.shape[1], index % cache.shape[1]]
    return [torch.arange(cache.shape[0], device=cache.device).unsqueeze(-1), None, index]


def _skip_negative(cache: Tensor, index: Tensor, rows: Tensor, paged: bool) -> tuple[Tensor, Tensor]:
    """Let each skipped token repeat the first stored one: equal writes to one slot change nothing.

    Where no token is stored, they rewrite slot 0 with what it holds.
    """
    stored = index >= 0
    first = stored.int().argmax(-1, keepdim=True)
    spare = index.gather(-1, first).clamp(min=0)
    held = torch.ops.aten.index.Tensor(cache, _address(cache, spare, paged)).squeeze(-2)
    repeated = rows.gather(-2, first.unsqueeze(-1).expand(*rows.shape[:-2], 1, rows.shape[-1]))
    filler = torch.where(stored.any(-1, keepdim=True).unsqueeze(-1), repeated, held)
    return torch.where(stored, index, spare), torch.where(stored.unsqueeze(-1), rows, filler)
