"""Contexts that lie in pages, which attention reads tile after tile: no copy of a whole one is made."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mla_fx.ops.common.check import INTEGERS, check_dtype, check_shape, readable

TILE = 512  # tokens gathered at a time: what a cache of the processor holds, and few enough tiles

STAYS = "it reads pages tile after tile, and a compiler would first gather the whole context"


def context_of(cache: Tensor, block_table: Tensor | None) -> int:
    """T of a cache [B, T, width], or of pages [BlockNum, BlockSize, width] that a table [B, Blocks] names."""
    return cache.shape[1] if block_table is None else block_table.shape[1] * cache.shape[1]


def gathered(cache: Tensor, block_table: Tensor) -> Tensor:
    """The rows of the pages that a table [B, Blocks] names, [B, Blocks * BlockSize, width]."""
    rows: Tensor = torch.ops.aten.index.Tensor(cache, [block_table]).flatten(1, 2)
    return rows


def in_one_piece(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """The contexts as rows of memory, [B, T, width], copied out of pages or from between others."""
    return cache.contiguous() if block_table is None else gathered(cache, block_table)


def tiles(cache: Tensor, block_table: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """The context a few pages at a time, or a part of a large one, with the tokens where each begins and ends."""
    columns, size = block_table.shape[1], cache.shape[1]
    many = max(1, TILE // max(1, size))
    for column in range(0, columns, many):
        table = block_table[:, column : column + many]
        for start in range(0, size, TILE):
            rows = gathered(cache[:, start : start + TILE], table)
            first = column * size + start
            yield rows, first, first + rows.shape[1]


def check_contexts(
    kv_cache: Tensor,
    kr_cache: Tensor | None,
    block_table: Tensor | None,
    batch: int,
    widths: tuple[int | None, int | None],
) -> int:
    """Both caches hold the same contexts, or pages of the same size; returns T. A width that is None is any."""
    letters, lead = ("B, T", batch) if block_table is None else ("BlockNum, BlockSize", None)
    check_shape("kv_cache", kv_cache, f"{letters}, Hckv", (lead, None, widths[0]))
    if kr_cache is not None:
        check_shape("kr_cache", kr_cache, f"{letters}, Dr", (lead, kv_cache.shape[1], widths[1]))
    if block_table is not None:
        caches = {"kv_cache": kv_cache, "kr_cache": kr_cache}
        blocks = {name: cache.shape[0] for name, cache in caches.items() if cache is not None}
        check_block_table(block_table, batch, blocks)
    return context_of(kv_cache, block_table)


def check_block_table(block_table: Tensor, batch: int, caches: Mapping[str, int]) -> None:
    check_shape("block_table", block_table, "B, Blocks", (batch, None))
    check_dtype("block_table", block_table, INTEGERS)
    if not readable(block_table) or block_table.numel() == 0:
        return
    for number in (int(block_table.min()), int(block_table.max())):
        for name, blocks in caches.items():
            if not -blocks <= number < blocks:
                raise ValueError(
                    f"block_table holds {number}; it must be below {blocks}, the number of blocks of {name}, and not "
                    f"below {-blocks}, its first one counted from the end."
                )
