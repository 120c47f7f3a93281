"""Lowers attention to one of its forms, or to both with a conditional if a call chooses by its query tokens."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention import heads
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    Arguments,
    Results,
    is_absorbed,
    is_chosen_at_run_time,
    is_masked,
)
from mla_fx.ops.emitted.attention.chosen_rows import over_all
from mla_fx.ops.emitted.attention.heads import absorbed, expanded
from mla_fx.ops.emitted.attention.latents import over_latents
from mla_fx.ops.emitted.attention.operator import body
from mla_fx.ops.emitted.attention.packed_sequences import one_by_one, sequences
from mla_fx.ops.emitted.attention.pages import READS_PAGES, context_of, in_one_piece
from mla_fx.ops.emitted.attention.softmax import fake_sums
from mla_fx.ops.emitted.attention.tiles import Form, goes_by_tiles, is_expressible, rows_first
from mla_fx.target import Compiled

from .conditional import can_choose, conditional
from .costs import has_few_scores
from .latents import in_parts, undivided

OPERATOR = "attention"
IN_TILES = "it works on tiles of query rows; a compiler would keep the scores of all rows"
BY_ROWS = "it takes some query rows at a time; a compiler would copy the chosen keys of all of them"
BY_SEQUENCES = "its logarithms are those of one sequence after the other"
COMPUTED = "it chooses its form at each call, and sizes of its operands are computed, which a conditional does not take"


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
