"""Contexts gathered through tables."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fx.cases import HCKV, B, Layer, T

BLOCK = 4


class Gathered(Layer):
    """Caches in pages, written by position and read through a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(B * T // BLOCK).view(B, -1))

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.tables()
        written = super().store(latent, k_rope, position)
        pages = (cache.reshape(-1, BLOCK, cache.shape[-1]) for cache in written)
        latents, keys = (cache[table].view(B, 1, T, -1) for cache, table in zip(pages, tables, strict=True))
        return latents, keys

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table


class OtherTable(Gathered):
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table.flip(0)


class GatheredCodes(Gathered):
    """Latents in int8 with a scale for each token, in pages."""

    def __init__(self) -> None:
        super().__init__()
        self.codes: Tensor
        self.scales: Tensor
        draw = torch.Generator().manual_seed(1)
        self.register_buffer("codes", torch.randint(-128, 128, (B * T // BLOCK, BLOCK, HCKV), generator=draw).char())
        self.register_buffer("scales", 0.01 + 0.02 * torch.rand(*self.codes.shape[:2], 1, generator=draw))

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        _, keys = super().store(latent, k_rope, position)
        numbers = self.codes[self.table].to(latent.dtype) * self.scales[self.table_of_scales()]
        return numbers.view(B, 1, T, -1), keys

    def table_of_scales(self) -> Tensor:
        return self.table


class OtherTableOfScales(GatheredCodes):
    def table_of_scales(self) -> Tensor:
        return self.table.flip(0)
