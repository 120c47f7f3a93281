"""Attention over paged caches, as the vendor's decoders compute it: tile by tile of keys, with an online softmax.

B sequences, K key heads, M query rows of one key head (steps times heads of its group), W key positions of one tile.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .cast import i8_half_rint

TILE = 128

Tile = tuple[Tensor, Tensor]
Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def host_lengths(lengths: Tensor) -> Tensor:
    """Return lengths as int64 on the CPU, where the vendor's operators need them; this waits for a device."""
    return lengths.to("cpu", torch.int64)


def row_index(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which of the concatenated rows is row r of sequence b, [B, max(counts)], and whether that row exists."""
    steps = torch.arange(int(counts.max()) if counts.numel() else 0)
    present = steps < counts.unsqueeze(-1)
    starts = counts.cumsum(0) - counts
    return torch.where(present, starts.unsqueeze(-1) + steps, 0), present


def gather_rows(cache: Tensor, block_tables: Tensor, positions: Tensor) -> Tensor:
    """Return the rows of a cache [BlockNum, BlockSize, ...] at `positions` [W] of each sequence: [B, W, ...].

    Positions past the table, and entries that name no block, such as -1, read any block; callers hide their scores.
    """
    block_size = cache.shape[1]
    column = (positions // block_size).clamp(max=block_tables.shape[1] - 1)
    block = block_tables[:, column].long().clamp(0, cache.shape[0] - 1)
    return cache[block, positions % block_size]


def online_softmax(tiles: Iterable[Tile], product: Product, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return `softmax(scores) @ values` and the natural logarithm of each row's sum of exponentials, both unrounded.

    `tiles` yields scores [B, K, M, W], -inf where hidden, and values [B, K, W, Dv], finite where hidden from all rows.
    `product(weights, tile_max, running_max, values)` is the weighted sum of values of one tile, for weights
    `exp(scores - running_max)`. `like` [B, K, M, Dv] gives shape, dtype and device of the result. A row that sees
    nothing gives 0, and its logarithm is -inf.
    """
    total = like.new_zeros(like.shape)
    weight = like.new_zeros(*like.shape[:-1], 1)
    running_max = torch.full_like(weight, -torch.inf)
    for scores, values in tiles:
        tile_max = scores.amax(-1, keepdim=True)
        new_max = torch.maximum(running_max, tile_max)
        origin = torch.where(new_max == -torch.inf, 0, new_max)
        weights = (scores - origin).exp()
        decay = (running_max - origin).exp()
        total = total * decay + product(weights, tile_max, origin, values)
        weight = weight * decay + weights.sum(-1, keepdim=True)
        running_max = new_max
    out = torch.where(weight == 0, 0, total / weight)
    return out, weight.log() + torch.where(weight == 0, 0, running_max)


def rounded_product(dtype: torch.dtype) -> Product:
    """Round the weights to `dtype` before they are multiplied by the values; do not round the sum."""

    def product(weights: Tensor, tile_max: Tensor, running_max: Tensor, values: Tensor) -> Tensor:
        return weights.to(dtype).to(values.dtype) @ values

    return product


def int8_product(descale: Tensor) -> Product:
    """Quantise each row of weights to int8 with a scale of its own, its largest weight over 127; `descale` is [.., M,
    1]."""

    def product(weights: Tensor, tile_max: Tensor, running_max: Tensor, values: Tensor) -> Tensor:
        seen = tile_max != -torch.inf
        scale = torch.where(seen, (tile_max - running_max).exp() / 127, 1)
        quantized = i8_half_rint(weights / scale).to(values.dtype)
        return (quantized @ values) * (descale * scale)

    return product
