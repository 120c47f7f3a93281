"""Lowers latent_attention of few rows to products that are divided by the sum of a row at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.latent_attention import Arguments, scores, weighted
from mla_fx.ops.emitted.pages import READS_PAGES, in_one_piece
from mla_fx.ops.emitted.tiled_attention import count_of_scores, goes_by_tiles

from .undivided import undivided

OPERATOR = "latent_attention"
PART = 2**21  # scores at a time, at least; measured on a CPU
MAX_PARTS = 4  # each part is compiled separately
IN_TILES = "it works on tiles of query rows; a compiler would keep the scores of all rows"


def lower(a: Arguments) -> Callable[[Arguments], Tensor]:
    if a.block_table is not None:
        raise NoMatch(READS_PAGES)
    if goes_by_tiles(a.query, a.kv_cache.shape[1]):
        raise NoMatch(IN_TILES)
    return in_parts


def from_copies(a: Arguments) -> Tensor:
    """The same from a copy of the contexts, with all scores stored at once."""
    return in_parts(in_one_piece(a))


def in_parts(a: Arguments) -> Tensor:
    """The same in parts of the batch."""
    count = _parts(a)
    if count == 1:
        return _undivided(a)
    size = a.query.shape[0] // count
    return torch.cat([_undivided(_of_sequences(a, slice(part * size, (part + 1) * size))) for part in range(count)])


def _undivided(a: Arguments) -> Tensor:
    dtype = a.kv_cache.dtype
    return undivided(lambda weights: weighted(weights, a), dtype, *scores(a), a.scale, a.fill, a.sinks, rows_first=True)


def _parts(a: Arguments) -> int:
    """The number of parts of a batch. On a CPU, reusing a few megabytes is faster than getting more from the system."""
    batch, scores = a.query.shape[0], count_of_scores(a.query, a.kv_cache.shape[1])
    if a.query.device.type != "cpu" or scores is None:
        return 1
    return max(part for part in range(1, MAX_PARTS + 1) if part == 1 or (batch % part == 0 and scores >= part * PART))


def _of_sequences(a: Arguments, part: slice) -> Arguments:
    def cut(value: Tensor | None) -> Tensor | None:
        return value if value is None or value.shape[0] == 1 else value[part]

    return replace(
        a,
        query=a.query[part],
        query_rope=cut(a.query_rope),
        kv_cache=a.kv_cache[part],
        kr_cache=cut(a.kr_cache),
        mask=a.mask if a.mask is None or a.mask.dim() < 4 else cut(a.mask),
        context_lens=cut(a.context_lens),
    )
