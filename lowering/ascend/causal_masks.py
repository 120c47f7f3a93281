"""Masks that come from outside of a graph, and that the user declares causal with option causal_masks.

Kernels take lengths and no mask. A declared mask gives its length, and is compared with the mask of that length: where
the two differ, results are NaN, not silently those of another mask.

Masks are [..., S, T], broadcast to [B, 1, S, T]: bool, or 0 for keys that are seen and a large negative number for
those that are not."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fx.errors import NoMatch

from . import limits
from .surface import Surface

HIDDEN = -1e4  # a score of at most this is hidden: its exponential is zero


def refuse(surface: Surface, mask: Tensor, tokens: int, kernel: str) -> None:
    """Raises NoMatch for a mask that is not declared causal, or whose shape says that it is not."""
    if not surface.trusts_masks:
        raise NoMatch(
            f"mask is a tensor; {kernel} takes the length of each sequence, and the mask is not provably "
            "causal; set causal_masks=True if it is"
        )
    if mask.dim() == 4 and not limits.known_equal(mask.shape[1], 1):
        raise NoMatch(f"mask has shape {list(mask.shape)}; a causal mask is the same for all heads")
    if mask.dim() < 2 or not limits.known_equal(mask.shape[-2], tokens):
        raise NoMatch(f"mask has shape {list(mask.shape)}; a causal mask has a row for each of S = {tokens} tokens")


def lengths(mask: Tensor) -> Tensor:
    """The number of keys that the last row of each sequence sees, [B] or [1]."""
    return _seen(_rows(mask)[:, -1]).sum(-1)


def checked(out: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Tensor:
    """The result [B, S, N, D], or NaN for each sequence whose mask is not the causal one of its length."""
    if mask is None or lengths is None:
        return out
    rows = _rows(mask)
    tokens, positions = rows.shape[1:]
    last = torch.arange(tokens, device=mask.device) - (tokens - 1) + lengths.unsqueeze(-1)
    causal = torch.arange(positions, device=mask.device) < last.unsqueeze(-1)
    differs = _seen(rows) != causal
    if mask.dtype != torch.bool:
        differs = differs | ((rows > HIDDEN) & (rows != 0))
    return out.masked_fill(differs.any(-1).any(-1).view(-1, 1, 1, 1), torch.nan)


def _rows(mask: Tensor) -> Tensor:
    """[B or 1, S, T]"""
    return mask[(None,) * (4 - mask.dim())][:, 0]


def _seen(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.bool else rows == 0
