"""Keys of every head that are normalised and rotated in front, and values, which layers write by slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    tokens: int = 3
    heads: int = 2
    width: int = 12
    rotary: int = 4
    columns: int = 6
    block: int = 16
    hidden: int = 32


class Keys(nn.Module):
    """Halves are rotated, as in openPangu, in pieces that tests override."""

    def __init__(self, sizes=None):
        super().__init__()
        self.sizes = z = sizes or Sizes()
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.k_proj = nn.Parameter(drawn(z.hidden, z.heads * z.width) * z.hidden**-0.5)
        self.v_proj = nn.Parameter(drawn(z.hidden, z.heads * z.columns) * z.hidden**-0.5)
        self.gamma = nn.Parameter(1 + 0.3 * drawn(z.width))

    def attended(self, x, k_cache, v_cache):
        """Each token sees all that is stored. No rule takes this attention."""
        query = x[..., : self.sizes.width]
        scores = torch.einsum("bsd,tnd->bnst", query, k_cache.flatten(0, 1)) * 0.1
        return torch.einsum("bnst,tnv->bsnv", scores.softmax(-1), v_cache.flatten(0, 1))

    def forward(self, x, angle, slots, k_cache, v_cache):
        key, value = ((x @ weight).unflatten(-1, (self.sizes.heads, -1)) for weight in (self.k_proj, self.v_proj))
        cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in (angle.cos(), angle.sin()))
        key = self.rotated(self.norm(key), cos, sin)
        self.store(k_cache, slots, key)
        self.store(v_cache, self.others(slots), self.values(value))
        return key.flatten(2), self.attended(x, k_cache, v_cache)

    def norm(self, key):
        wide = key.double() if key.dtype == torch.float64 else key.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return self.gamma * scaled.to(key.dtype)

    def rotated(self, key, cos, sin):
        turned, rest = key.split([self.sizes.rotary, self.sizes.width - self.sizes.rotary], -1)
        one, other = turned.chunk(2, -1)
        half = torch.cat((-other, one), -1)
        return torch.cat((turned * torch.cat((cos, cos), -1) + half * torch.cat((sin, sin), -1), rest), -1)

    def store(self, cache, slots, rows):
        cache.view(-1, *cache.shape[2:])[slots] = rows

    def others(self, slots):
        return slots

    def values(self, value):
        return value


class Interleaved(Keys):
    """Columns alternate, and are written as halves: what the vendor's kernel reads as it is."""

    def rotated(self, key, cos, sin):
        turned, rest = key.split([self.sizes.rotary, self.sizes.width - self.sizes.rotary], -1)
        one, other = turned.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), -1)


class ByBlocks(Keys):
    def store(self, cache, slots, rows):
        size = self.sizes.block
        cache[slots // size, slots % size] = rows


class ValuesFirst(Keys):
    def forward(self, x, angle, slots, k_cache, v_cache):
        value = (x @ self.v_proj).unflatten(-1, (self.sizes.heads, -1))
        self.store(v_cache, slots, value)
        key = (x @ self.k_proj).unflatten(-1, (self.sizes.heads, -1))
        cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in (angle.cos(), angle.sin()))
        self.store(k_cache, slots, self.rotated(self.norm(key), cos, sin))
        return (self.attended(x, k_cache, v_cache),)


def arguments(sizes=None, dtype=torch.float64):
    z, generator = sizes or Sizes(), torch.Generator().manual_seed(1)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    caches = [drawn(7, z.block, z.heads, width) for width in (z.width, z.columns)]
    slots = torch.randperm(7 * z.block, generator=generator)[: z.batch * z.tokens].view(z.batch, z.tokens)
    angle = torch.rand(z.batch, z.tokens, z.rotary // 2, generator=generator, dtype=torch.float64) * 6
    return drawn(z.batch, z.tokens, z.hidden), angle, slots, *caches
