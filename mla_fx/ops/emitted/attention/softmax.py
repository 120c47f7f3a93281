"""The softmax of MLA, and the checks that its operators share."""

import math
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import FLOATS, Sizes, check_dtype, check_letters, check_shape, known_to_differ
from mla_fx.ops.common.math import accumulation_dtype

from .arguments import Scoring


def as_mask(
    mask: Tensor | None, context_lens: Tensor | None, is_causal: bool, queries: Tensor, context: int, first: int = 0
) -> Tensor | None:
    """Return the given one of the three ways to hide keys, as a mask that broadcasts to [B, N, S, T], or None.

    `queries` is [B, S, ...] and `context` T. Lengths hide keys from number `first` on; the mask starts there."""
    if context_lens is None and not is_causal:
        return mask
    slots = torch.arange(first, context, device=queries.device)
    return slots <= last_keys(context_lens, queries).unsqueeze(-1)


def last_keys(context_lens: Tensor | None, queries: Tensor) -> Tensor:
    """The number of the last key that each row of queries [B, S, ...] sees, [B or 1, 1, S]; [S] without lengths, where
    row s sees the keys t <= s."""
    steps = queries.shape[1]
    rows = torch.arange(steps, device=queries.device)
    return rows if context_lens is None else rows + (context_lens - steps).view(-1, 1, 1)


def probabilities(
    latent: Tensor,
    rotated: Tensor | None,
    mask: Tensor | None,
    how: Scoring,
    rows_first: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return softmax((latent + rotated) * scale + mask) over the last axis, unrounded, in the accumulation dtype, and
    the logarithms of the sums that it divides by, which leave out sinks; an empty tensor without `return_lse`.

    The scores are [B, N, S, T], or [B, S, N, T] with `rows_first`; the mask broadcasts to [B, N, S, T] either way.
    Where a bool mask is False, the scores are `fill`, as closely as their dtype holds it, or minus infinity. `sinks`
    [N] adds one score to each row; its probability is dropped.
    """
    scores = scaled(latent, rotated, how)
    if mask is not None:
        scores = masked(scores, aligned(mask, rows_first), how.fill)
    lse = scores.logsumexp(-1) if return_lse else scores.new_empty(0)
    if mask is None and how.sinks is None and not return_lse:
        return scores.softmax(-1), lse
    if how.sinks is not None:
        scores = torch.cat((scores, column_of(how.sinks, scores, rows_first).expand(*scores.shape[:-1], 1)), -1)
    # Unlike softmax, this gives zeros for a row that is masked entirely.
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1, scores.dtype)
    return weights if how.sinks is None else weights[..., :-1], lse


def share(keys: int) -> float:
    """A number that makes the maximum over the keys at most 1 after division: a power of two, if known, which rounds
    nothing."""
    return 0.5 ** (keys - 1).bit_length() if isinstance(keys, int) else 1 / keys


def scaled(latent: Tensor, rotated: Tensor | None, how: Scoring) -> Tensor:
    """The scores before a mask, in the accumulation dtype."""
    scores = latent.to(accumulation_dtype(latent.dtype))
    return (scores if rotated is None else scores + rotated) * how.scale


def aligned(mask: Tensor, rows_first: bool) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.transpose(1, 2) if rows_first else mask


def column_of(sinks: Tensor, scores: Tensor, rows_first: bool) -> Tensor:
    return sinks.to(scores.dtype).view((-1, 1) if rows_first else (-1, 1, 1))


def masked(scores: Tensor, mask: Tensor, fill: float | None) -> Tensor:
    """Scores where a bool mask, which broadcasts to them, is True, and `fill` elsewhere. Or scores plus a mask, whose
    minus infinity hides any score, even NaN."""
    if mask.dtype != torch.bool:
        return (scores + mask).masked_fill(mask == -torch.inf, -torch.inf)
    limits = torch.finfo(scores.dtype)
    return scores.masked_fill(~mask, -torch.inf if fill is None else min(max(fill, limits.min), limits.max))


def check_sinks(a: Any, sizes: Sizes) -> None:
    """Check that there is a sink for each head, and that no logarithms are asked for beside them."""
    check_letters(a, sizes, sinks="N")
    if a.sinks is not None and a.return_lse:
        why = "a sum with a sink is not what other parts are merged by"
        raise ValueError(f"sinks are given; they must be None with return_lse: {why}.")


def fake_sums(query: Tensor, return_lse: bool = True) -> Tensor:
    """Room for the logarithms [B, S, N] of queries [B, S, N, ...], or an empty tensor."""
    return query.new_empty(query.shape[:3] if return_lse else [0], dtype=accumulation_dtype(query.dtype))


def check_mask(
    mask: Tensor | None, context_lens: Tensor | None, is_causal: bool, fill: float | None, sizes: Sizes
) -> None:
    """Check that a mask broadcasts to [B, N, S, T]."""
    if fill is not None and not math.isfinite(fill):
        raise ValueError(f"fill is {fill}; it must be finite, or None for minus infinity.")
    if fill is not None and context_lens is None and (mask is None or mask.dtype != torch.bool):
        raise ValueError(
            f"fill is {fill}, but mask is no bool mask and context_lens is None; scores are filled only where one of "
            "them hides a key."
        )
    if mask is not None and is_causal:
        raise ValueError("mask is given and is_causal is True; at most one of them is allowed.")
    if context_lens is not None:
        _check_context_lens(context_lens, mask, is_causal, sizes["B"])
    if mask is None:
        return
    check_dtype("mask", mask, (torch.bool, *FLOATS))
    whole = [sizes[axis] for axis in "BNST"]
    pairs = zip(mask.shape, whole[4 - mask.dim() :], strict=False)
    if mask.dim() > 4 or any(
        known_to_differ(actual, wanted) and known_to_differ(actual, 1) for actual, wanted in pairs
    ):
        raise ValueError(f"mask has shape {list(mask.shape)}; it must broadcast to [B, N, S, T] = {whole}.")


def _check_context_lens(context_lens: Tensor, mask: Tensor | None, is_causal: bool, batch: int) -> None:
    if mask is not None or is_causal:
        other = "is_causal is True" if mask is None else "mask is given"
        raise ValueError(f"context_lens is given and {other}; at most one of them is allowed.")
    check_dtype("context_lens", context_lens, (torch.int64,))
    check_shape("context_lens", context_lens, "B", (batch,), broadcast=True)
