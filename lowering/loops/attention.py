"""Lowers attention to one of its forms, or to both with a conditional if a call chooses by its query tokens."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.machine import multiplies_tiles
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    Arguments,
    Results,
    Scoring,
    is_absorbed,
    is_chosen_at_run_time,
    is_masked,
)
from mla_fx.ops.emitted.attention.chosen_rows import over_all
from mla_fx.ops.emitted.attention.heads import absorbed, expanded
from mla_fx.ops.emitted.attention.latents import in_numbers, over_latents, scores, weighted
from mla_fx.ops.emitted.attention.operator import body
from mla_fx.ops.emitted.attention.pages import READS_PAGES, context_of, in_one_piece
from mla_fx.ops.emitted.attention.parts import of_sequences, one_by_one, sequences
from mla_fx.ops.emitted.attention.softmax import aligned, column_of, fake_sums, masked, probabilities, scaled, share
from mla_fx.ops.emitted.attention.tiles import Form, count_of_scores, goes_by_tiles, is_expressible, rows_first
from mla_fx.target import Compiled

from .conditional import can_choose, conditional

OPERATOR = "attention"
IN_TILES = "it works on tiles of query rows; a compiler would keep the scores of all rows"
BY_ROWS = "it takes some query rows at a time; a compiler would copy the chosen keys of all of them"
BY_SEQUENCES = "its logarithms are those of one sequence after the other"
COMPUTED = "it chooses its form at each call, and sizes of its operands are computed, which a conditional does not take"

# Measured on CPUs.
FEW_SCORES = 2**23  # 724 tokens of 16 heads, 256 of 128
WITHOUT_TILES = 4  # times as many on a CPU without AMX
PART = 2**21  # scores at a time, at least
MAX_PARTS = 4  # each part is compiled separately


def lower(a: Arguments) -> Compiled:
    if a.weight_uk is None:
        return lower_latents(a)
    if a.indices is not None:
        raise NoMatch(BY_ROWS)
    if a.return_lse:
        return lower_with_sums(a)
    for sequence in [a] if a.lens is None else sequences(a):
        check_forms(sequence)
    if a.block_table is not None and a.max_absorbed_tokens != 0:
        raise NoMatch(READS_PAGES)
    return compiled


def lower_latents(a: Arguments) -> Compiled:
    """Lower a call without weights."""
    if a.indices is not None:
        return over_latents
    if a.block_table is not None:
        raise NoMatch(READS_PAGES)
    if a.return_lse:
        return over_latents
    if goes_by_tiles(a.query, a.kv_cache.shape[1]):
        raise NoMatch(IN_TILES)
    return in_parts


def lower_with_sums(a: Arguments) -> Compiled:
    """Lower a call of heads to the body over contexts in one piece."""
    if a.lens is not None:
        raise NoMatch(BY_SEQUENCES)
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)
    if a.block_table is not None and is_absorbed(a):
        raise NoMatch(READS_PAGES)
    if goes_by_tiles(a.query, context_of(a.kv_cache, a.block_table)):
        raise NoMatch(IN_TILES)
    return body


def check_forms(a: Arguments) -> None:
    """Raise NoMatch if the forms cannot be compiled in memory that does not grow with S * T."""
    chooses = is_chosen_at_run_time(a)
    if chooses and not all(cache.is_contiguous() for cache in (a.kv_cache, a.kr_cache) if cache is not None):
        raise NoMatch(f"{CHOOSES}, and its caches are not contiguous")
    is_tiled = chooses or not is_absorbed(a)
    if (chooses or (is_tiled and is_masked(a))) and not can_choose(_tensors(a).values()):
        raise NoMatch(COMPUTED)
    context = context_of(a.kv_cache, a.block_table)
    fits = is_tiled and is_expressible(a.query, context, a.mask, a.scoring)
    if not fits and goes_by_tiles(a.query, context):
        raise NoMatch(IN_TILES)


# --- products that are divided by the sum of a row at the end --------------------------------------------------------


def in_parts(a: Arguments) -> Results:
    """Compute attention over latents without logarithms, in parts of the batch."""
    no_sums, a = fake_sums(a.query, return_lse=False), in_numbers(a)
    count = _parts(a)
    if count == 1:
        return _undivided(a), no_sums
    size = a.query.shape[0] // count
    parts = (of_sequences(a, slice(part * size, (part + 1) * size)) for part in range(count))
    return torch.cat(list(map(_undivided, parts))), no_sums


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


# --- forms -----------------------------------------------------------------------------------------------------------


def compiled(a: Arguments) -> Results:
    """Compute attention of heads without logarithms, in memory that does not grow with S * T. A symbolic S traces both
    forms."""
    if a.lens is not None:
        return one_by_one(a, compiled)
    if is_chosen_at_run_time(a):
        return at_run_time(a, tiled)
    if is_absorbed(a):
        return absorbed(a, in_parts)
    return short(a) if has_few_scores(a) else tiled(a)


@functools.cache  # one function for equal calls, which are traced once
def absorbed_by(attend: Compiled) -> Compiled:
    """The absorbed form, for a function that computes attention over latents."""
    return functools.partial(absorbed, attend=attend)


in_latent_space = absorbed_by(in_parts)


def from_copies(a: Arguments) -> Results:
    """Compute attention from a copy of the contexts. It stores all scores at once unless PyTorch's own attention gives
    the same result."""
    if a.lens is not None:
        return one_by_one(a, from_copies)
    a = in_one_piece(a if a.indices is None else over_all(a))
    if a.weight_uk is None:
        return over_latents(a) if a.return_lse else in_parts(a)
    if a.return_lse:
        return expanded(a) if is_chosen_at_run_time(a) else body(a)
    many = tiled if is_expressible(a.query, a.kv_cache.shape[1], a.mask, a.scoring) else expanded
    if is_chosen_at_run_time(a):
        return at_run_time(a, many) if can_choose(_tensors(a).values()) else expanded(a)
    return absorbed(a, in_parts) if is_absorbed(a) else many(a)


def at_run_time(a: Arguments, expand: Compiled, absorb: Compiled = in_latent_space) -> Results:
    """A conditional on the S of the call, without logarithms."""
    tensors, widths = _tensors(a), [weight.shape[1] for weight in a.weights]
    if not all(weight.is_contiguous() for weight in a.weights):
        # slices of one weight are joined to that weight, which a conditional takes without copying it
        tensors["weight_uk"] = torch.cat((tensors["weight_uk"], tensors.pop("weight_uv")), 1)

    def form(compute: Compiled) -> Form:
        def of(*given: Tensor) -> Tensor:
            read: dict[str, Any] = dict(zip(tensors, given, strict=True))
            if "weight_uv" not in read:
                read["weight_uk"], read["weight_uv"] = torch.split(read["weight_uk"], widths, 1)
            out, _ = compute(replace(a, **read, max_absorbed_tokens=0))  # the form is chosen
            return out  # type: ignore[no-any-return]

        return of

    sizes, condition = (*a.query.shape[:3], widths[1]), a.query.shape[1] <= a.max_absorbed_tokens
    out = conditional(condition, form(absorb), form(expand), tuple(tensors.values()), sizes)
    return out, fake_sums(a.query, return_lse=False)


def _tensors(a: Arguments) -> dict[str, Tensor]:
    return {name: value for name, value in vars(a).items() if isinstance(value, Tensor)}


def tiled(a: Arguments) -> Results:
    return heads.tiled(a, conditional)


def short(a: Arguments) -> Results:
    """`expanded` for few scores on a CPU."""
    scores, value = heads.operands(a)
    out = undivided(lambda weights: weights @ value, value.dtype, *scores, a.scoring)
    return rows_first(out), fake_sums(a.query, return_lse=False)


def has_few_scores(a: Arguments) -> bool:
    """Whether PyTorch's own attention is slower than plain products."""
    scores = count_of_scores(a.query, context_of(a.kv_cache, a.block_table))
    few = FEW_SCORES * (1 if multiplies_tiles() else WITHOUT_TILES)
    return a.query.device.type == "cpu" and scores is not None and scores <= few
