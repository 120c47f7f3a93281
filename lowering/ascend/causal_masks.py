"""Masks that come from outside of a graph, and that the user declares causal with option causal_masks.

Kernels take lengths and no mask. A declared mask gives its length, and is compared with the mask of that length: where
the two differ, results are NaN, not silently those of another mask.

Masks are [..., S, T], broadcast to [B, 1, S, T]: bool, or 0 for keys that are seen and a large negative number for
those that are not."""

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.softmax import as_mask

from . import limits
from .limits import Surface

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
    return _seen(_in_four(mask)[:, 0, -1]).sum(-1)


def checked(out: Tensor, mask: Tensor | None, context_lens: Tensor | None) -> Tensor:
    """The result [B, S, N, D], or NaN for each sequence whose mask is not the causal one of its length."""
    if mask is None:
        return out
    given, causal = _in_four(mask), as_mask(None, context_lens, False, out, mask.shape[-1])
    assert causal is not None, "a mask gives lengths"
    differs = _seen(given) != causal
    if mask.dtype != torch.bool:
        differs = differs | ((given > HIDDEN) & (given != 0))
    return out.masked_fill(differs.any(-1, keepdim=True).any(-2, keepdim=True), torch.nan)


def _in_four(mask: Tensor) -> Tensor:
    """[B or 1, 1, S, T]"""
    return mask[(None,) * (4 - mask.dim())]


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
