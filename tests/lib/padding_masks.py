"""Padding masks by arithmetic: a plane of flags, 1 at tokens and 0 at padding, becomes numbers that are added to the
scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .layers import Layer, Sizes, arguments, in_type

Spelling = Callable[[Tensor, torch.dtype], Tensor]

SPELLINGS: dict[str, Spelling] = {
    "one minus flags": lambda pad, dtype: (1.0 - pad.to(dtype)) * -10000.0,  # BERT's
    "one minus flags, the lowest number": lambda pad, dtype: (1.0 - pad.to(dtype)) * torch.finfo(dtype).min,
    "flags minus one": lambda pad, dtype: (pad.to(dtype) - 1) * 1e9,
    "rsub": lambda pad, dtype: torch.rsub(pad.to(dtype), 1.0) * -10000.0,
    "minus flags plus one": lambda pad, dtype: (-pad.to(dtype) + 1.0) * -10000.0,
    "one minus a condition": lambda pad, dtype: (1.0 - (pad > 0).to(dtype)) * -10000.0,
    "where": lambda pad, dtype: torch.where(pad > 0, 0.0, -1e9).to(dtype),
    "masked_fill": lambda pad, dtype: torch.zeros(pad.shape, dtype=dtype).masked_fill(pad == 0, torch.finfo(dtype).min),
    "a condition times a number": lambda pad, dtype: ((pad == 0) * -10000.0).to(dtype),
    "logarithm": lambda pad, dtype: pad.to(dtype).log(),
    "integers first": lambda pad, dtype: ((1 - pad) * -10000).to(dtype),
    "a product minus a number": lambda pad, dtype: pad.to(dtype) * 1e9 - 1e9,
    "a quotient": lambda pad, dtype: (pad.to(dtype) - 1.0) / 1e-4,
}
QUICK = "one minus flags", "one minus flags, the lowest number", "rsub"


class Padded(Layer):
    """`spelling` makes of flags [B, T] what is added to the scores. A cache that `grows` is longer by the tokens."""

    def __init__(self, spelling: Spelling | None = None, sizes: Sizes | None = None, grows: bool = False) -> None:
        super().__init__(sizes)
        self.spelling, self.grows = spelling, grows

    def forward(
        self, x: Tensor, tables: tuple[Tensor, ...], position: Tensor, caches: tuple[Tensor, Tensor], pad: Tensor
    ) -> tuple[Tensor, ...]:
        z = self.sizes
        q_nope, q_rope = self.query(x).split([z.nope, z.rope], dim=-1)
        latent, k_rope = self.rows(x)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.rotate_key(k_rope, *tables)
        latent, k_rope = self.store(latent, k_rope, position, *caches)
        key, value = self.keys(latent, k_rope)
        scores = self.scores(torch.cat((q_nope, q_rope), dim=-1), key)
        out = self.weigh(self.hide(scores, position, pad[:, None, None, :], x), value, pad)
        out = out.transpose(1, 2).flatten(2) @ self.o.T
        return (out, latent, k_rope) if self.grows else (out,)

    def store(
        self, latent: Tensor, k_rope: Tensor, position: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.grows:
            return torch.cat((kv_cache, latent), dim=2), torch.cat((kr_cache, k_rope), dim=2)
        return super().store(latent, k_rope, position, kv_cache, kr_cache)

    def hide(self, scores: Tensor, position: Tensor, pad: Tensor, x: Tensor) -> Tensor:
        """`pad` is [B,1,1,T]."""
        if self.spelling is None:
            later = torch.arange(self.sizes.context) > position[:, None]
            return scores.masked_fill(later | (pad == 0), -torch.inf)
        return scores + (self.mask(position) + self.spelling(pad, x.dtype))

    def weigh(self, scores: Tensor, value: Tensor, pad: Tensor) -> Tensor:
        return self.combine(scores, value)


def given(layer: Padded, dtype: torch.dtype, flags: torch.dtype = torch.int64) -> tuple[Any, ...]:
    """Padding of another length at the left of each sequence, and a hole in the last one."""
    z = layer.sizes
    pad = (torch.arange(z.context) >= 1 + 2 * torch.arange(z.batch)[:, None]).to(flags)
    pad[-1, 5] = 0
    return *without_padding(layer, dtype), pad


def without_padding(layer: Padded, dtype: torch.dtype) -> tuple[Any, ...]:
    z = layer.sizes
    kept = z.context - z.tokens
    x, tables, position, caches = in_type(arguments(z, first=kept if layer.grows else None), dtype)
    if layer.grows:
        caches = tuple(cache[:, :, :kept].contiguous() for cache in caches)
    return x, tables, position, caches
