"""Contexts in pages, which attention reads tile by tile: a whole context is never copied.

Pages of latents may be in FRACTAL_NZ, [BlockNum, width/n0, BlockSize, n0]. In kernels, n0 elements take 32 bytes."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cache import from_nz
from mla_fx.ops.common.check import INTEGERS, Sizes, check_dtype, check_fractals, check_letters, readable

from .arguments import Arguments
from .codes import SCALES, dequantised, numbers, of_rows
from .softmax import as_mask

TILE = 512  # tokens gathered at a time: they fit a processor's cache, and make few tiles

READS_PAGES = "it reads pages tile by tile; a compiler would first gather the whole context"


def context_of(cache: Tensor, block_table: Tensor | None) -> int:
    """T of a cache [B, T, width], or of the pages of latents in a table [B, Blocks]."""
    return cache.shape[-2] if block_table is None else block_table.shape[1] * cache.shape[-2]


def whole_mask(a: Arguments) -> Tensor | None:
    """What hides keys of a call, as a mask that broadcasts to [B, N, S, T], or None."""
    return as_mask(a.mask, a.context_lens, a.is_causal, a.query, context_of(a.kv_cache, a.block_table))


def gathered(cache: Tensor, block_table: Tensor) -> Tensor:
    """The rows of the pages in a table [B, Blocks]: [B, Blocks * BlockSize, width]."""
    rows: Tensor = torch.ops.aten.index.Tensor(cache, [block_table]).flatten(1, 2)
    return rows


def from_start(block_table: Tensor, blocks: int) -> Tensor:
    """The table with every block counted from the start."""
    return torch.where(block_table < 0, block_table + blocks, block_table)


def unpaged(a: Arguments) -> Arguments:
    """Copy the rows of a call out of its pages, and replace codes by numbers."""
    if a.block_table is None:
        return dequantised(a)
    pages = {name: _in_rows(getattr(a, name)) for name in SCALES if getattr(a, name) is not None}
    scales = {name: of_rows(getattr(a, name), pages[cache]) for cache, name in SCALES.items() if cache in pages}
    held = {name: value for name, value in (pages | scales).items() if value is not None}
    rows: dict[str, Any] = {name: gathered(value, a.block_table).flatten(2) for name, value in held.items()}
    return dequantised(replace(a, **rows, block_table=None))


def in_one_piece(a: Arguments) -> Arguments:
    """Make the contexts of a call contiguous rows, [B, T, width]."""
    a = unpaged(a)
    kr_cache = None if a.kr_cache is None else a.kr_cache.contiguous()
    return replace(a, kv_cache=a.kv_cache.contiguous(), kr_cache=kr_cache)


def without_codes(a: Arguments) -> Arguments:
    return a if a.kv_scales is None else unpaged(a)


def _in_rows(pages: Tensor) -> Tensor:
    """[BlockNum, BlockSize, ...]: a view of pages of latents in which the dimensions of a row are adjacent."""
    return pages.transpose(1, 2) if pages.dim() == 4 else pages


def tiles(cache: Tensor, block_table: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the context a few pages, or a part of a large page, at a time, with the first token and the one after the
    last."""
    columns, size = block_table.shape[1], cache.shape[1]
    many = max(1, TILE // max(1, size))
    for column in range(0, columns, many):
        table = block_table[:, column : column + many]
        for start in range(0, size, TILE):
            rows = gathered(cache[:, start : start + TILE], table)
            first = column * size + start
            yield rows, first, first + rows.shape[1]


def latent_tiles(
    pages: Tensor, block_table: Tensor, scales: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[Tensor, int, int]]:
    """The same as `tiles`, of pages of latents or of codes of them, which become numbers of a dtype. Each tile is [B,
    rows, width]."""
    own = of_rows(scales, pages)
    tiles_of_scales = itertools.repeat(None) if own is None else (part for part, _, _ in tiles(own, block_table))
    for (rows, first, last), part in zip(tiles(_in_rows(pages), block_table), tiles_of_scales, strict=False):
        yield numbers(rows.flatten(2), part, dtype), first, last


def check_contexts(arguments: Any, sizes: Sizes) -> None:
    """Check that both caches hold the same contexts of T rows, or pages of the same size."""
    paged = arguments.block_table is not None
    if paged and arguments.kv_cache.dim() == 4:
        arguments = _without_fractals(arguments)
    letters = "BlockNum, BlockSize" if paged else "B, T"
    check_letters(arguments, sizes, kv_cache=f"{letters}, Hckv")
    sizes.pop("BlockNum", None)  # each has as many as it likes
    check_letters(arguments, sizes, kr_cache=f"{letters}, Dr")
    if paged:
        check_block_table(arguments, sizes, "kv_cache", "kr_cache")


def _without_fractals(arguments: Any) -> Any:
    """Replace pages in FRACTAL_NZ by pages of rows."""
    widths = {"kv_cache": "Hckv", "kr_cache": "Dr"}
    caches = {name: getattr(arguments, name) for name in widths if getattr(arguments, name) is not None}
    for name, pages in caches.items():
        check_fractals(name, pages, widths[name])
    return replace(arguments, **{name: from_nz(pages).squeeze(2) for name, pages in caches.items()})


def check_block_table(arguments: Any, sizes: Sizes, *caches: str) -> None:
    """Check that the table names blocks that all caches have, and gives a context T rows."""
    block_table = arguments.block_table
    check_letters(arguments, sizes, block_table="B, Blocks")
    check_dtype("block_table", block_table, INTEGERS)
    sizes["T"] = sizes["Blocks"] * sizes["BlockSize"]
    if not readable(block_table) or block_table.numel() == 0:
        return
    given = {name: cache for name in caches if (cache := getattr(arguments, name)) is not None}
    for number in (int(block_table.min()), int(block_table.max())):
        for name, cache in given.items():
            blocks = cache.shape[0]
            if not -blocks <= number < blocks:
                raise ValueError(
                    f"block_table holds {number}; it must be below {blocks}, the number of blocks of {name}, and not "
                    f"below {-blocks}, its first one counted from the end."
                )
