"""Programs that attend to parts of a context and merge them."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_fx.cases import DV, HCKV, B, D, Layer, T

BLOCK = 4


class Parts(Layer):
    """Attention over two parts of the context, merged."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * 0.3 + mask
        halves = zip(self.pieces(scores, -1), self.pieces(value, -2), strict=True)
        parts = [(half.softmax(-1) @ values, half.logsumexp(-1)) for half, values in halves]
        return self.merged(*zip(*parts, strict=True))

    def pieces(self, value: Tensor, dim: int) -> tuple[Tensor, ...]:
        """A row between the two belongs to neither."""
        half = value.shape[dim] // 2
        return value.narrow(dim, 0, half - 1), value.narrow(dim, half, half)

    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        shares = torch.stack(lses).softmax(0).unsqueeze(-1)
        return (torch.stack(outs) * shares).sum(0)


class Exponentials(Parts):
    """Rows that no part sees are zero."""

    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        largest = torch.maximum(*lses)
        weights = [(lse - torch.where(largest == -torch.inf, 0.0, largest)).exp().unsqueeze(-1) for lse in lses]
        parts = (torch.where(one == 0, 0.0, out * one) for out, one in zip(outs, weights, strict=True))
        return sum(parts, torch.zeros(())) / sum(weights, torch.zeros(())).clamp(min=1e-10)


class BaseTwo(Parts):
    def merged(self, outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> Tensor:
        first, second = lses
        weight = 1 / (1 + (second - first).exp2())
        return torch.lerp(outs[1], outs[0], weight.unsqueeze(-1))


class Halves(Exponentials):
    def pieces(self, value: Tensor, dim: int) -> tuple[Tensor, ...]:
        return value.chunk(2, dim)


class Pages(Exponentials):
    """Each half of a block table is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(B * T // BLOCK).view(B, -1))

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        weight_uk, weight_uv = torch.split(self.kv_b.view(q_nope.shape[1], -1, HCKV), [D, DV], 1)
        query, parts = q_nope @ weight_uk, []
        pages = [cache.reshape(-1, BLOCK, cache.shape[-1]) for cache in (latent, k_rope)]
        for table, hidden in zip(self.table.chunk(2, 1), mask.chunk(2, -1), strict=True):
            latents, keys = (cache[table].view(B, 1, T // 2, -1) for cache in pages)
            scores = (query @ latents.mT + q_rope @ keys.mT) * 0.3 + hidden
            parts.append((scores.softmax(-1) @ latents, scores.logsumexp(-1)))
        out: Tensor = self.merged(*zip(*parts, strict=True)) @ weight_uv.mT
        return out
