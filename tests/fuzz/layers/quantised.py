"""Weights, tokens and caches in 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .pages import Pages
from .plain import Layer, Sizes

MOST = 126.7  # no whole number: the largest code is not at the edge between two


class Quantised(Layer):
    """The key side's weight in 8 bits, with a scale for each column that its product is multiplied by."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kv_a_scales, self.kv_a_stored = self.quantised(self.kv_a)

    def quantised(self, weight: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
        scales = weight.detach().abs().amax(1) / 127
        stored = (weight.detach() / scales.unsqueeze(1)).round().to(torch.int8)
        return nn.Parameter(scales), nn.Parameter(stored, requires_grad=False)

    def rows(self, x: Tensor) -> Tensor:
        return (x @ self.kv_a_stored.to(x.dtype).T) * self.kv_a_scales


class Dequantised(Quantised):
    """All down projections in 8 bits, taken to 64 bits before the product."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.q_a_scales, self.q_a_stored = self.quantised(self.q_a)

    def rows(self, x: Tensor) -> Tensor:
        return x @ (self.kv_a_stored.to(x.dtype) * self.kv_a_scales.unsqueeze(1)).T

    def compressed(self, x: Tensor) -> Tensor:
        return x @ (self.q_a_stored.to(x.dtype) * self.q_a_scales.unsqueeze(1)).T


class QuantisedUp(Quantised):
    """The projection from latents in 8 bits, with a scale for each column that its product is multiplied by."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kv_b_scales, self.kv_b_stored = self.quantised(self.kv_b)

    def up(self, latent: Tensor) -> Tensor:
        return (latent @ self.kv_b_stored.to(latent.dtype).T) * self.kv_b_scales

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        up = self.up(latent.squeeze(1)).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        k_nope, value = up.split([sizes.nope, sizes.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, sizes.heads, -1, -1)), dim=-1), value


class QuantisedTokens(QuantisedUp):
    """Latents are quantised, too, and integers are multiplied."""

    def tokens(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        scales = latent.abs().amax(-1, keepdim=True) / 127
        return (latent / scales).round().to(torch.int8), scales

    def up(self, latent: Tensor) -> Tensor:
        codes, scales = self.tokens(latent)
        product = codes.to(torch.int32).flatten(0, -2) @ self.kv_b_stored.to(torch.int32).T
        return product.unflatten(0, codes.shape[:-1]).to(latent.dtype) * scales * self.kv_b_scales


class UnsignedTokens(QuantisedTokens):
    """The same with codes to which 128 is added before, and subtracted after."""

    def up(self, latent: Tensor) -> Tensor:
        codes, scales = self.tokens(latent)
        unsigned = (codes.to(torch.int32) + 128).to(torch.uint8).flatten(0, -2)
        columns = self.kv_b_stored.T
        product = torch._int_mm(unsigned, columns) - columns.sum(0, keepdim=True, dtype=torch.int32) * 128
        return product.unflatten(0, codes.shape[:-1]).to(latent.dtype) * scales * self.kv_b_scales


class GroupedUp(QuantisedUp):
    """Two groups of latents, each with its scales and zero points."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kv_b_groups = nn.Parameter(self.random(len(self.kv_b), 2).abs() * 0.05 + 0.01)
        zeros = self.random(len(self.kv_b), 2).round().to(torch.int8)
        self.kv_b_zeros = nn.Parameter(zeros, requires_grad=False)

    def up(self, latent: Tensor) -> Tensor:
        codes = self.kv_b_stored.unflatten(1, (2, -1)).to(latent.dtype)
        weight = (codes - self.kv_b_zeros.unsqueeze(-1)) * self.kv_b_groups.unsqueeze(-1)
        return latent @ weight.flatten(1).T


class PackedUp(QuantisedUp):
    """Eight codes of 4 bits in each 32-bit number, with two zero points and scales for each row."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        rows = len(self.kv_b)
        self.shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        words = (self.codes(rows, -(-sizes.rank // 8), 8) << self.shifts).sum(-1).to(torch.int32)
        self.words, self.zeros = (nn.Parameter(part, requires_grad=False) for part in (words, self.codes(rows, 2)))
        self.steps = nn.Parameter(self.random(rows, 2).abs() * 0.05 + 0.02)

    def codes(self, *shape: int) -> Tensor:
        return torch.randint(0, 16, shape, generator=self.draw, dtype=torch.int32)

    def unpacked(self) -> Tensor:
        codes = ((self.words.unsqueeze(-1) >> self.shifts) & 15).flatten(1)[:, : self.sizes.rank]
        return self.of_groups(codes.unflatten(1, (2, -1)) - self.zeros.unsqueeze(-1))

    def of_groups(self, values: Tensor) -> Tensor:
        return (values * self.steps.unsqueeze(-1)).flatten(1)

    def up(self, latent: Tensor) -> Tensor:
        return latent @ self.unpacked().T


class LookedUp(PackedUp):
    """The same codes are places of a table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Parameter(self.random(16))

    def unpacked(self) -> Tensor:
        codes = self.words.new_zeros(len(self.words), 8 * self.words.shape[1])
        for place in range(8):
            codes[:, place::8] = (self.words >> 4 * place) & 15
        return self.of_groups(self.table[codes[:, : self.sizes.rank].unflatten(1, (2, -1))] * 8)


class Int8Query(Quantised):
    """The query's projection in int8, of tokens in int8."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.q_b_scales, self.q_b_stored = self.quantised(self.q_b)

    def tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(-1, keepdim=True) / 127
        return (x / scales).round().clamp(-128, 127).to(torch.int8), scales

    def product(self, x: Tensor, stored: Tensor, scales: Tensor) -> Tensor:
        codes, by = self.tokens(x)
        integers = codes.to(torch.int32).flatten(0, -2) @ stored.to(torch.int32).T
        return integers.unflatten(0, codes.shape[:-1]).to(x.dtype) * by * scales

    def query(self, compressed: Tensor) -> Tensor:
        return self.product(compressed, self.q_b_stored, self.q_b_scales)

    def rows(self, x: Tensor) -> Tensor:
        return x @ self.kv_a.T


class Int8Projections(Int8Query):
    """All projections to latents and of the query in int8. Tokens are quantised for each, by both of their ends."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.q_a_scales, self.q_a_stored = self.quantised(self.q_a)

    def tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).clamp(min=1e-9) / 127
        return (x * (1 / scales)).round().to(torch.int8), scales

    def compressed(self, x: Tensor) -> Tensor:
        return self.product(x, self.q_a_stored, self.q_a_scales)

    def rows(self, x: Tensor) -> Tensor:
        return self.product(x, self.kv_a_stored, self.kv_a_scales)


class SmoothedQuery(Int8Query):
    """The query's latent is multiplied by a factor per column first; codes are multiplied in floats."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.smooth = self.gamma(sizes.q_rank)

    def query(self, compressed: Tensor) -> Tensor:
        codes, by = self.tokens(compressed * self.smooth)
        return (codes.to(by.dtype) @ self.q_b_stored.to(by.dtype).T) * (by * self.q_b_scales)


class StoredInEight(Layer):
    """A cache of codes with a scale for each token beside it."""

    def caches(self) -> tuple[Tensor, ...]:
        latents, keys = super().caches()
        scales = latents.abs().amax(-1, keepdim=True) / 127
        return (latents / scales).round().to(torch.int8), scales, keys

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        codes, scales, keys = caches
        own = latent.abs().amax(-1, keepdim=True) / 127
        codes.index_copy_(2, place, (latent / own).round().to(torch.int8))
        scales.index_copy_(2, place, own)
        keys.index_copy_(2, place, k_rope)
        return codes.to(latent.dtype) * scales, keys


class InTiles(StoredInEight):
    """The same with a scale for each half of a latent."""

    def coded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        tiles = latents.unflatten(-1, (2, -1))
        scales = tiles.abs().amax(-1) / MOST
        return (tiles / scales.unsqueeze(-1)).flatten(-2).round().to(torch.int8), scales

    def caches(self) -> tuple[Tensor, ...]:
        latents, keys = Layer.caches(self)
        return *self.coded(latents.detach()), keys

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (*self.coded(latent), k_rope), strict=True):
            cache[:, :, place] = rows
        codes, scales, keys = caches
        return self.numbers(codes, scales), keys

    def numbers(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes.to(scales.dtype).unflatten(-1, (2, -1)) * scales.unsqueeze(-1)).flatten(-2)


class CodedPages(Pages):
    """Codes and the scales of tokens in pages, with one table."""

    def coded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        scales = latents.abs().amax(-1, keepdim=True) / MOST
        return (latents / scales).round().to(torch.int8), scales

    def caches(self) -> tuple[Tensor, ...]:
        latents, keys = super().caches()
        return *self.coded(latents.detach()), keys

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        codes, scales, keys = super().store(caches, latent, k_rope, place)
        return codes.to(keys.dtype) * scales, keys

    def written(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, ...]:
        return *self.coded(latent), k_rope


class RowsOfBytes(CodedPages):
    """A page holds the bytes of codes, which are cut off, of a scale, and of a rotary key."""

    def coded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        scales = latents.abs().amax(-1, keepdim=True) / MOST
        return (latents / scales).to(torch.int8), scales

    def bytes_of(self, *parts: Tensor) -> Tensor:
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)

    def caches(self) -> tuple[Tensor, ...]:
        codes, scales, keys = super().caches()
        return (self.bytes_of(keys.detach(), scales, codes),)

    def written(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, ...]:
        codes, scales = self.coded(latent)
        return (self.bytes_of(k_rope, scales, codes),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        (rows,) = Pages.store(self, caches, latent, k_rope, place)
        keys, scales, codes = rows.split([8 * self.sizes.rope, 8, self.sizes.rank], -1)
        return codes.view(torch.int8).to(latent.dtype) * scales.view(latent.dtype), keys.view(latent.dtype)


class GivenScales(Layer):
    """A cache of codes, of latents times a given factor for each column."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.factors = nn.Parameter(30 * self.gamma(sizes.rank).detach().abs())

    def codes(self, latent: Tensor) -> Tensor:
        return (latent * self.factors).round().clamp(-128, 127).to(torch.int8)

    def caches(self) -> tuple[Tensor, ...]:
        latents, keys = super().caches()
        return self.codes(latents.detach()).detach(), keys

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        codes, keys = caches
        codes.index_copy_(2, place, self.codes(latent))
        keys.index_copy_(2, place, k_rope)
        return codes.to(latent.dtype) * (1 / self.factors), keys
