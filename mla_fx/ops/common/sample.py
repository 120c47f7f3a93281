"""Seeded dense data for the operators' samples: every value matters, and sums stay near one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Sampler:
    """Draws tensors of one dtype from one seed; the draws are the same in every dtype up to rounding."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.dtype)

    def weight(self, *shape: int, fan_in: int) -> Tensor:
        return self.normal(*shape) / math.sqrt(fan_in)

    def gamma(self, width: int) -> Tensor:
        """1 +- 0.3."""
        unit = torch.rand(width, generator=self.generator, dtype=torch.float64)
        return (1 + 0.3 * (2 * unit - 1)).to(self.dtype)

    def tables(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Two rotary tables with different halves, so that reading the wrong half shows."""
        angle = 6 * torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def slots(self, count: int, limit: int, skip: int = 0) -> Tensor:
        """`count` different indices below `limit`; the first `skip` of them are -1."""
        index = torch.randperm(limit, generator=self.generator)[:count]
        index[:skip] = -1
        return index

    def block_tables(self, counts: Sequence[int], blocks: int) -> Tensor:
        """Different blocks for each sequence, as many as it counts, followed by -1."""
        table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
        filled = torch.arange(table.shape[1]) < torch.tensor(counts).unsqueeze(-1)
        return table.masked_scatter(filled, self.slots(sum(counts), blocks).int())
