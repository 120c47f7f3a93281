"""A layer with int8 caches in pages and scales that are given, as in Ascend's C8 recipes. Tests override its pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lib.layers import Absorbed, Sizes, arguments, in_type

SMALL = Sizes()


def coded(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).round().clamp(-128, 127).to(torch.int8)


class CodedPages(Absorbed):
    """Caches [Blocks, BlockSize, 1, width] are written by slots and read by a table [B, T / BlockSize].

    A scale for each column multiplies unrounded values, as kernels do it; what is read is multiplied by a table of
    reciprocals."""

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: Sizes = SMALL, block: int = 8) -> None:
        super().__init__(sizes)
        self.to(dtype)
        self.block, count = block, sizes.batch * sizes.context // block
        draw = torch.Generator().manual_seed(3)
        self.table = nn.Buffer(torch.randperm(count + 2, generator=draw)[:count].view(sizes.batch, -1))
        scales = (25 + 30 * torch.rand(width, generator=draw) for width in (sizes.rank, sizes.rope))
        self.of_latents, self.of_keys = map(nn.Buffer, scales)

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latent, k_rope = self.project(x).split([self.sizes.rank, self.sizes.rope], dim=-1)
        gamma = self.kv_gamma.float()
        return self.norm(self.widened(latent), gamma).unsqueeze(1), self.widened(k_rope).unsqueeze(1)

    def project(self, x: Tensor) -> Tensor:
        return x @ self.kv_a.T

    def widened(self, x: Tensor) -> Tensor:
        return x.float()

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Follows the operator, so that not even the last bit of a float32 differs."""
        wide = x.float()
        return (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.float()).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.float()
        return super().rotate(torch.cat((wide[..., ::2], wide[..., 1::2]), -1), cos.float(), sin.float()).to(x.dtype)

    def store(
        self, latent: Tensor, k_rope: Tensor, position: Tensor, kv_cache: Tensor, kr_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        slots = (self.table[:, position // self.block] * self.block + position % self.block).flatten()
        return self.stored(latent, slots, kv_cache), self.stored_key(k_rope, slots, kr_cache)

    def stored(self, latent: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        self.write(cache, slots, coded(latent, self.of_latents))
        return self.dequantised(cache, self.of_latents.reciprocal())

    def stored_key(self, k_rope: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        self.write(cache, slots, coded(k_rope, self.of_keys))
        return self.dequantised(cache, self.of_keys.reciprocal())

    def write(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        cache.view(-1, cache.shape[-1])[slots] = rows.flatten(0, 2)

    def read(self, cache: Tensor) -> Tensor:
        """[B, 1, T, width]."""
        return cache.view(-1, self.block, 1, cache.shape[-1])[self.table].flatten(1, 3).unsqueeze(1)

    def dequantised(self, cache: Tensor, by: Tensor) -> Tensor:
        return (self.read(cache).float() * by).to(self.kv_a.dtype)


class OneScale(CodedPages):
    """Latents have one scale, and rotary keys are stored as they are."""

    def stored(self, latent: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        scale = self.of_latents[0]
        self.write(cache, slots, coded(latent, scale))
        return self.dequantised(cache, 1 / scale)

    def stored_key(self, k_rope: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        self.write(cache, slots, k_rope.to(cache.dtype))
        return self.read(cache)


class RoundedFirst(CodedPages):
    """Values are rounded to the dtype of the model before they are quantised."""

    def widened(self, x: Tensor) -> Tensor:
        return x


def given(layer: CodedPages) -> tuple[Any, ...]:
    """x, tables, positions, and caches as pages; two of these belong to no sequence."""
    z, dtype = layer.sizes, layer.kv_a.dtype
    x, tables, position, _ = in_type(arguments(z), dtype)
    draw = torch.Generator().manual_seed(4)
    lead = layer.table.numel() + 2, layer.block, 1
    latents, keys = (40 * torch.randn(*lead, width, generator=draw) for width in (z.rank, z.rope))
    codes = tuple(cache.round().clamp(-128, 127).to(torch.int8) for cache in (latents, keys))
    return x, tables, position, (codes[0], (keys / 40).to(dtype) if isinstance(layer, OneScale) else codes[1])
