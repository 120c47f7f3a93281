"""Keys and values of heads: keys are normalised, rotated in their first columns, and written beside their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .pages import BLOCK
from .plain import Layer, Sizes

HEADS = 2  # of keys


class KeysOfHeads(Layer):
    """A sequence has a part of the pages, and each token any slot."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.k, self.v = self.weight(HEADS * sizes.query, sizes.hidden), self.weight(HEADS * sizes.value, sizes.hidden)
        self.k_gamma = self.gamma(sizes.query)

    def tables(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return tuple(self.random(sizes.batch, sizes.tokens, 1, sizes.rope) for _ in range(2))

    def place(self) -> Any:
        sizes = self.sizes
        count = sizes.batch * sizes.tokens
        slots = torch.randperm(sizes.batch * sizes.context, generator=self.draw)[:count]
        return slots.view(sizes.batch, sizes.tokens)

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        lead = sizes.batch * sizes.context // BLOCK, BLOCK, HEADS
        return self.random(*lead, sizes.query), self.random(*lead, sizes.value)

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        sizes = self.sizes
        batch, tokens = x.shape[:2]
        query = self.query(self.norm(self.compressed(x), self.q_gamma)).view(batch, tokens, sizes.heads, -1)
        key, value = ((x @ weight.T).unflatten(-1, (HEADS, -1)) for weight in (self.k, self.v))
        turned, rest = self.norm(key, self.k_gamma).split([sizes.rope, sizes.nope], dim=-1)
        rows = torch.cat((self.rotate(turned, *tables), rest), dim=-1), value
        for cache, new in zip(caches, rows, strict=True):
            cache.flatten(0, 1)[place] = new
        key, value = (cache.view(batch, sizes.context, HEADS, -1).transpose(1, 2) for cache in caches)
        key, value = (rows.repeat_interleave(sizes.heads // HEADS, 1) for rows in (key, value))
        out = self.probabilities(query.transpose(1, 2) @ key.mT * 0.4, mask) @ value
        return out.transpose(1, 2).reshape(batch, tokens, -1) @ self.o.T


class KeysInterleaved(KeysOfHeads):
    """Columns that alternate are written as halves."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2), cos, sin)
