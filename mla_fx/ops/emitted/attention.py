"""The softmax of MLA, and the checks that its operators share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import FLOATS, Sizes, check_dtype, check_letters, check_shape, known_to_differ
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.sizes import statically_known_true


def as_mask(
    mask: Tensor | None, context_lens: Tensor | None, is_causal: bool, queries: Tensor, context: int, first: int = 0
) -> Tensor | None:
    """Return the given one of the three ways to hide keys, as a mask that broadcasts to [B, N, S, T], or None.

    `queries` is [B, S, ...] and `context` T. Lengths hide keys from number `first` on; the mask starts there."""
    if context_lens is None and not is_causal:
        return mask
    steps = queries.shape[1]
    slots = torch.arange(first, context, device=queries.device)
    rows = torch.arange(steps, device=queries.device)
    last = rows if context_lens is None else rows + (context_lens - steps).view(-1, 1, 1)
    return slots <= last.unsqueeze(-1)


def probabilities(
    latent: Tensor,
    rotated: Tensor | None,
    mask: Tensor | None,
    scale: float,
    fill: float | None,
    sinks: Tensor | None = None,
    rows_first: bool = False,
) -> Tensor:
    """Return softmax((latent + rotated) * scale + mask) over the last axis, unrounded, in the accumulation dtype.

    The scores are [B, N, S, T], or [B, S, N, T] with `rows_first`; the mask broadcasts to [B, N, S, T] either way.
    Where a bool mask is False, the scores are `fill`, as closely as their dtype holds it, or minus infinity. `sinks`
    [N] adds one score to each row; its probability is dropped.
    """
    scores = logits(latent, rotated, mask, scale, fill, rows_first)
    if mask is None and sinks is None:
        return scores.softmax(-1)
    if sinks is not None:
        scores = torch.cat((scores, _column(sinks, scores, rows_first).expand(*scores.shape[:-1], 1)), -1)
    # Unlike softmax, this gives zeros for a row that is masked entirely.
    weights: Tensor = torch.ops.aten._safe_softmax.default(scores, -1, scores.dtype)
    return weights if sinks is None else weights[..., :-1]


def logits(
    latent: Tensor, rotated: Tensor | None, mask: Tensor | None, scale: float, fill: float | None, rows_first: bool
) -> Tensor:
    """Return what `probabilities` are the softmax of, without sinks."""
    scores = _scaled(latent, rotated, scale)
    return scores if mask is None else masked(scores, _aligned(mask, rows_first), fill)


def undivided(
    product: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    latent: Tensor,
    rotated: Tensor | None,
    mask: Tensor | None,
    scale: float,
    fill: float | None,
    sinks: Tensor | None = None,
    rows_first: bool = False,
) -> Tensor:
    """Return the product of `probabilities`, rounded to `dtype`, with values, and divide by the sum of a row only then.

    For a compiler that fuses loops: it stores rounded probabilities, where a softmax keeps all scores in float32."""
    if dtype == torch.float16 or statically_known_true(latent.shape[-1] == 0):  # no range for sums, or no maximum
        return product(probabilities(latent, rotated, mask, scale, fill, sinks, rows_first).to(dtype))
    scores = _scaled(latent, rotated, scale)
    if mask is not None:
        scores = masked(scores, _aligned(_stored(mask, fill, scores.dtype), rows_first), fill)
    highest = scores.amax(-1, keepdim=True)
    column = None if sinks is None else _column(sinks, scores, rows_first)
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


def share(keys: int) -> float:
    """A number that makes the maximum over the keys at most 1 after division: a power of two, if known, which rounds
    nothing."""
    return 0.5 ** (keys - 1).bit_length() if isinstance(keys, int) else 1 / keys


def _scaled(latent: Tensor, rotated: Tensor | None, scale: float) -> Tensor:
    scores = latent.to(accumulation_dtype(latent.dtype))
    return (scores if rotated is None else scores + rotated) * scale


def _aligned(mask: Tensor, rows_first: bool) -> Tensor:
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.transpose(1, 2) if rows_first else mask


def _column(sinks: Tensor, scores: Tensor, rows_first: bool) -> Tensor:
    return sinks.to(scores.dtype).view((-1, 1) if rows_first else (-1, 1, 1))


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


def masked(scores: Tensor, mask: Tensor, fill: float | None) -> Tensor:
    """Scores where a bool mask, which broadcasts to them, is True, and `fill` elsewhere. Or scores plus a mask, whose
    minus infinity hides any score, even NaN."""
    if mask.dtype != torch.bool:
        return (scores + mask).masked_fill(mask == -torch.inf, -torch.inf)
    limits = torch.finfo(scores.dtype)
    return scores.masked_fill(~mask, -torch.inf if fill is None else min(max(fill, limits.min), limits.max))


def check_rotary(name: str, arguments: Any, sizes: Sizes) -> None:
    """Check that the queries `name` and kr_cache both have a rotary part, or neither."""
    queries, keys = getattr(arguments, name), arguments.kr_cache
    if (queries is None) != (keys is None):
        given, missing = (name, "kr_cache") if keys is None else ("kr_cache", name)
        raise ValueError(f"{given} is given and {missing} is None; a rotary part has both, or there is none.")
    check_letters(arguments, sizes, **{name: "B, S, N, Dr"})


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
