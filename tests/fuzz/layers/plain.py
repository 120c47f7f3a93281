"""The layer that the others vary, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    tokens: int = 3
    context: int = 8
    heads: int = 4
    hidden: int = 9
    q_rank: int = 7
    rank: int = 6
    nope: int = 5
    rope: int = 4
    value: int = 10
    start: int = 4

    @property
    def query(self) -> int:
        return self.nope + self.rope


SMALL = Sizes()


class Layer(nn.Module):
    """Called with hidden states, tables, positions, a mask and two caches. Others override a method or two."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.draw = torch.Generator().manual_seed(0)
        heads, rank = sizes.heads, sizes.rank
        self.q_a, self.q_b = self.weight(sizes.q_rank, sizes.hidden), self.weight(heads * sizes.query, sizes.q_rank)
        self.kv_a = self.weight(rank + sizes.rope, sizes.hidden)
        self.kv_b = self.weight(heads * (sizes.nope + sizes.value), rank)
        self.o = self.weight(sizes.hidden, heads * sizes.value)
        self.q_gamma, self.kv_gamma = self.gamma(sizes.q_rank), self.gamma(rank)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def weight(self, out: int, inner: int) -> nn.Parameter:
        return nn.Parameter(self.random(out, inner) * inner**-0.5)

    def gamma(self, size: int) -> nn.Parameter:
        return nn.Parameter(1 + 0.3 * self.random(size))

    # --- what it is called with ---------------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        sizes = self.sizes
        x = self.random(sizes.batch, sizes.tokens, sizes.hidden)
        return x, self.tables(), self.place(), self.mask(), self.caches()

    def tables(self) -> tuple[Tensor, ...]:
        return self.random(self.sizes.tokens, self.sizes.rope), self.random(self.sizes.tokens, self.sizes.rope)

    def place(self) -> Any:
        return torch.arange(self.sizes.start, self.sizes.start + self.sizes.tokens)

    def allowed(self) -> Tensor:
        return torch.arange(self.sizes.context) <= self.sizes.start + torch.arange(self.sizes.tokens).unsqueeze(-1)

    def mask(self) -> Tensor | None:
        allowed = self.allowed()
        return self.random(*allowed.shape).masked_fill(~allowed, -torch.inf)

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        lead = sizes.batch, 1, sizes.context
        return self.random(*lead, sizes.rank), self.random(*lead, sizes.rope)

    # --- what it computes ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        sizes = self.sizes
        batch, tokens = x.shape[:2]
        query = self.query(self.norm(self.compressed(x), self.q_gamma))
        q_nope, q_rope = query.view(batch, tokens, sizes.heads, -1).transpose(1, 2).split([sizes.nope, sizes.rope], -1)
        latent, k_rope = self.rows(x).split([sizes.rank, sizes.rope], dim=-1)
        latent = self.norm(latent, self.kv_gamma).unsqueeze(1)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.rotate(k_rope.unsqueeze(1), *tables)
        latent, k_rope = self.store(caches, latent, k_rope, place)
        out = self.attend(q_nope, q_rope, latent, k_rope, mask)
        return out.transpose(1, 2).reshape(batch, tokens, -1) @ self.o.T

    def compressed(self, x: Tensor) -> Tensor:
        return x @ self.q_a.T

    def query(self, compressed: Tensor) -> Tensor:
        return compressed @ self.q_b.T

    def rows(self, x: Tensor) -> Tensor:
        """Latent and rotary key, side by side."""
        return x @ self.kv_a.T

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        latents, keys = caches
        latents.index_copy_(2, place, latent)
        keys.index_copy_(2, place, k_rope)
        return latents, keys

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        up = (latent.squeeze(1) @ self.kv_b.T).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        k_nope, value = up.split([sizes.nope, sizes.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, sizes.heads, -1, -1)), dim=-1), value

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * 0.4
        return self.probabilities(scores, mask) @ value

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return (scores + mask).softmax(-1)
