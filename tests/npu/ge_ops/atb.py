"""MultiLatentAttention of ATB, written from its documents. No graph of GE has it; captured ones do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 128  # tokens of a block, and keys at a time
CACHE_MODES = ("krope_ctkv", "nzcache", "int8_nzcache")
MASK_TYPES = ("undefined", "mask_type_spec", "mask_type_free")
CALC_TYPES = ("calc_type_undefined", "calc_type_spec", "calc_type_ring")


def multi_latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    ctkv: Tensor,
    k_rope: Tensor,
    block_tables: Tensor,
    context_lens: Sequence[int],
    q_headnum: int,
    qk_scale: float,
    kv_headnum: int,
    *,
    qseqlen: Sequence[int] | None = None,
    calc_type: str = CALC_TYPES[0],
    cache_mode: str = CACHE_MODES[0],
    mask_type: str = MASK_TYPES[0],
    mask: Tensor | None = None,
    qk_descale: Tensor | None = None,
    pv_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, N, 512] and the logarithms of sums [T, N, 1] in float32. Rows see all keys or, with 128 heads or in int8,
    each one more than the row before it."""
    steps = [1] * len(context_lens) if qseqlen is None else list(qseqlen)
    _check(q_nope, steps, context_lens, (q_headnum, kv_headnum))
    modes = ((calc_type, CALC_TYPES), (cache_mode, CACHE_MODES), (mask_type, MASK_TYPES))
    strange = [mode for mode, allowed in modes if mode not in allowed]
    if strange or (calc_type == CALC_TYPES[0] and set(steps) != {1}):
        raise ValueError(f"{strange} are no modes of ATB, or calc_type is {calc_type!r} for qseqlen {steps}")
    is_int8 = q_nope.dtype == torch.int8
    is_causal = is_int8 or q_headnum == 128
    out, logarithms = torch.empty(q_nope.shape, dtype=q_rope.dtype), torch.empty(*q_nope.shape[:2], 1)
    for row in _rows(context_lens, steps):
        count = row.length - (row.behind if is_causal else 0)
        latents, keys = (_context(cache, block_tables[row.sequence], count) for cache in (ctkv, k_rope))
        nope = q_nope[row.number].float() @ latents.float().T  # exact in int8: sums are below 2^24
        scores = (nope * qk_descale[:, None] if is_int8 else nope) + q_rope[row.number].float() @ keys.float().T
        added = 0 if is_causal else _added(row, mask_type, mask)
        out[row.number], logarithms[row.number] = _attend(scores * qk_scale + added, latents, pv_descale)
    return out, logarithms


@dataclass(frozen=True)
class Row:
    """A query: its number, that of its sequence and of the step in it, and the keys of its sequence."""

    number: int
    sequence: int
    step: int
    steps: int
    length: int

    @property
    def behind(self) -> int:
        """How many rows of its sequence come after it."""
        return self.steps - self.step - 1


def _rows(lengths: Sequence[int], steps: Sequence[int]) -> Iterator[Row]:
    number = itertools.count()
    for sequence, (length, count) in enumerate(zip(lengths, steps, strict=True)):
        for step in range(count):
            yield Row(next(number), sequence, step, count, length)


def _added(row: Row, mask_type: str, mask: Tensor | None) -> Tensor:
    """What a mask adds to scores [L]: a row of it, or rows of a corner [.., 128] to the last one or two tiles."""
    if mask_type == MASK_TYPES[0]:
        return torch.zeros(row.length)
    if mask_type == MASK_TYPES[1]:
        return mask[row.number, : row.length].float()
    corner = mask if mask.ndim == 2 else mask[row.sequence]
    added, tail = torch.zeros(row.length), (row.length - 1) % TILE + 1
    if tail - 1 + row.step < len(corner):
        added[-tail:] = corner[tail - 1 + row.step, :tail]
    if row.length > tail and tail < row.steps - 1:
        added[-tail - TILE : -tail] = corner[tail + TILE - 1 + row.step]
    return added


def _context(cache: Tensor, table: Tensor, count: int) -> Tensor:
    """[count, width] of pages [blocks, 128, 1, width] or, in FRACTAL_NZ, [blocks, width/d0, 128, d0]."""
    blocks = table[: -(-count // TILE)].tolist()
    strange = [block for block in blocks if not 0 <= block < len(cache)]
    if strange or len(blocks) * TILE < count:
        raise ValueError(f"block_tables has {blocks} for {count} keys; blocks are 0 to {len(cache) - 1}")
    pages = cache[blocks]
    plain = pages.squeeze(2) if pages.shape[1] == TILE else pages.transpose(1, 2).flatten(2)
    return plain.flatten(0, 1)[:count]


def _attend(scores: Tensor, values: Tensor, descale: Tensor | None) -> tuple[Tensor, Tensor]:
    """[N, L], [L, D] -> [N, D] and [N, 1], tile by tile: weights are rounded against the largest score so far."""
    largest, total, out = torch.full((len(scores), 1), -torch.inf), torch.zeros(1), torch.zeros(1)
    for tile, rows in zip(scores.split(TILE, -1), values.split(TILE), strict=True):
        now = torch.maximum(largest, tile.amax(-1, keepdim=True))
        weights, kept = (tile - now).exp(), (largest - now).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        if descale is None:
            part = weights.to(rows.dtype).float() @ rows.float()
        else:
            step = (tile.amax(-1, keepdim=True) - now).exp() / 127
            part = (weights / step).half().round().float() @ rows.float() * (descale[:, None] * step)
        out, largest = out * kept + part, now
    return out / total, total.log() + largest


def _check(q_nope: Tensor, steps: Sequence[int], lengths: Sequence[int], heads: tuple[int, int]) -> None:
    """Rows of sequences without a context are undefined, so there must be none."""
    if heads != (q_nope.shape[1], 1) or heads[0] not in (8, 16, 32, 64, 128):
        raise ValueError(f"q_headnum and kv_headnum are {heads}; they are {q_nope.shape[1]}, 8 to 128, and 1")
    if 0 in lengths or sum(steps) != len(q_nope) or len(steps) != len(lengths):
        raise ValueError(f"context_lens is {lengths} and qseqlen is {steps} for {len(q_nope)} rows")
