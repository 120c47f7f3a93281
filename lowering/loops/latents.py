"""Attention over latents for compilers of loops: products that are divided by the sum of a row at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.attention.arguments import Arguments, Results, Scoring
from mla_fx.ops.emitted.attention.latents import in_numbers, scores, weighted
from mla_fx.ops.emitted.attention.parts import of_sequences
from mla_fx.ops.emitted.attention.softmax import aligned, column_of, fake_sums, masked, probabilities, scaled, share
from mla_fx.ops.emitted.attention.tiles import count_of_scores

PART = 2**21  # scores at a time, at least; measured on a CPU
MAX_PARTS = 4  # each part is compiled separately


def in_parts(a: Arguments) -> Results:
    """Compute attention over latents without logarithms, in parts of the batch."""
    return _in_parts(in_numbers(a)), fake_sums(a.query, return_lse=False)


def _in_parts(a: Arguments) -> Tensor:
    count = _parts(a)
    if count == 1:
        return _undivided(a)
    size = a.query.shape[0] // count
    return torch.cat([_undivided(of_sequences(a, slice(part * size, (part + 1) * size))) for part in range(count)])


def _undivided(a: Arguments) -> Tensor:
    dtype = a.kv_cache.dtype
    return undivided(lambda weights: weighted(weights, a), dtype, *scores(a), a.scoring, rows_first=True)


def _parts(a: Arguments) -> int:
    """The number of parts of a batch. On a CPU, reusing a few megabytes is faster than getting more from the system."""
    batch, scores = a.query.shape[0], count_of_scores(a.query, a.kv_cache.shape[1])
    if a.query.device.type != "cpu" or scores is None:
        return 1
    return max(part for part in range(1, MAX_PARTS + 1) if part == 1 or (batch % part == 0 and scores >= part * PART))


def undivided(
    product: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    latent: Tensor,
    rotated: Tensor | None,
    mask: Tensor | None,
    how: Scoring,
    rows_first: bool = False,
) -> Tensor:
    """Return the product of `probabilities`, rounded to `dtype`, with values, and divide by the sum of a row only then.

    A compiler of loops then stores rounded probabilities, where a softmax keeps all scores in float32."""
    if dtype == torch.float16 or statically_known_true(latent.shape[-1] == 0):  # no range for sums, or no maximum
        weights, _ = probabilities(latent, rotated, mask, how, rows_first)
        return product(weights.to(dtype))
    scores = scaled(latent, rotated, how)
    if mask is not None:
        scores = masked(scores, aligned(_stored(mask, how.fill, scores.dtype), rows_first), how.fill)
    highest = scores.amax(-1, keepdim=True)
    column = None if how.sinks is None else column_of(how.sinks, scores, rows_first)
    if column is not None:
        highest = highest.maximum(column)
    if mask is not None or column is not None:  # a row that sees nothing gives zeros
        highest = highest.masked_fill(highest == -torch.inf, 0)
    most = share(latent.shape[-1])  # of a weight, so that no sum of values leaves their range
    weights = (scores - highest).exp() * most
    total = weights.sum(-1, keepdim=True)
    if column is not None:
        total = total + (column - highest).exp() * most
    # A factor, because a reader that uses the result often may compute it each time.
    return (product(weights.to(dtype)) * total.masked_fill(total == 0, 1).reciprocal()).to(dtype)


def _stored(mask: Tensor, fill: float | None, dtype: torch.dtype) -> Tensor:
    """The mask as one that is added to scores of `dtype`. It is stored if it is the same for all heads: a compiler
    would otherwise recompute it for each of them, which takes as long as the softmax. Code that reads it by strides
    needs it stored."""
    is_wide = mask.dtype == dtype or torch.promote_types(mask.dtype, dtype) != dtype
    if fill is not None or is_wide or (mask.dim() > 2 and mask.shape[-3] != 1):
        return mask
    is_bool = mask.dtype == torch.bool
    added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf) if is_bool else mask.to(dtype)
    return added.as_strided(added.shape, added.stride())
