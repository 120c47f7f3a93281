"""Caches: where rows go, what is read, and how many share a buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .plain import Layer, Sizes


class AtSlice(Layer):
    """A Python number says where the rows go."""

    def place(self) -> int:
        return self.sizes.start

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, place : place + self.sizes.tokens] = rows
        return caches


class AtNumber(AtSlice):
    """One token, at a number."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, place] = rows[:, :, 0]
        return caches


class AtLast(AtNumber):
    def place(self) -> int:
        return -1


class AtLastSlice(AtSlice):
    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, -self.sizes.tokens :] = rows
        return caches


class AtIndex(Layer):
    """Positions are an index tensor."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, place] = rows
        return caches


class AtIndexFromTheEnd(AtIndex):
    def place(self) -> Tensor:
        return super().place() - self.sizes.context


class PlacedApart(Layer):
    """Each write computes its positions anew."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache.index_copy_(2, self.placed(place), rows)
        return caches

    def placed(self, place: Tensor) -> Tensor:
        return place.clamp(max=self.sizes.context - 2)


class ChosenApart(PlacedApart):
    def placed(self, place: Tensor) -> Tensor:
        return torch.where(place > self.sizes.context - 2, 0, place)


class ReadFromTheEnd(Layer):
    """The newest 32 of fewer tokens."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        latents, keys = super().store(caches, latent, k_rope, place)
        return latents[:, :, -32:], keys[:, :, -32:]


class ClonedAndCopied(Layer):
    """The cache is written in a copy, and that copied back."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        copied = super().store(tuple(cache.clone() for cache in caches), latent, k_rope, place)
        for cache, written in zip(caches, copied, strict=True):
            cache.copy_(written)
        return copied


class OldAndNew(Layer):
    """What the cache held before is returned."""

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        old = caches[0][:, :, 2:5] * 2.0
        return super().forward(x, tables, place, mask, caches), old


class Batched(Layer):
    """Each sequence at its own positions, in a cache with a dimension of sequences."""

    def place(self) -> Tensor:
        return super().place() + torch.arange(self.sizes.batch).unsqueeze(-1) % 2

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        sequences = torch.arange(self.sizes.batch).unsqueeze(-1)
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[sequences, 0, place] = rows.squeeze(1)
        return caches


class OneBuffer(AtSlice):
    """Both caches are slices of one buffer."""

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return (self.random(sizes.batch, 1, sizes.context, sizes.rank + sizes.rope),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        halves = caches[0][..., : self.sizes.rank], caches[0][..., self.sizes.rank :]
        return super().store(halves, latent, k_rope, place)


class OneBufferByLayer(Layer):
    """Both caches are parts of one buffer of all layers."""

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return (self.random(3, sizes.batch, 1, sizes.context, sizes.rank + 2),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        halves = caches[0][0][..., : self.sizes.rank], caches[0][1][..., : self.sizes.rope]
        return super().store(halves, latent, k_rope, place)


class FlatCache(AtNumber):
    """[B, T, R], one token at a number."""

    def caches(self) -> tuple[Tensor, ...]:
        return tuple(cache.squeeze(1).clone() for cache in super().caches())

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, place] = rows[:, 0, 0]
        return caches[0].unsqueeze(1), caches[1].unsqueeze(1)


class FlatCacheLast(FlatCache):
    def place(self) -> int:
        return -2


class TwoSteps(Layer):
    """The same layer twice over one pair of caches, at positions that follow each other."""

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        first = super().forward(x, tables, place, mask, caches)
        return first, super().forward(first, tables, place - 2, mask, caches)


class TwoLayers(Layer):
    """Two layers with weights and a cache of their own each."""

    each: type[Layer] = Layer

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.second = self.each(sizes)
        for weight in self.second.parameters():
            weight.data = weight.data.flip(0)

    def caches(self) -> tuple[Tensor, ...]:
        return (*super().caches(), *super().caches())

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        x, half = x.tanh(), len(caches) // 2
        x = x + super().forward(x, tables, place, mask, caches[:half])
        return x + self.second(x, tables, place, mask, caches[half:])


class Appended(Layer):
    """The old rows and the new ones."""

    def mask(self) -> None:
        return None

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        return torch.cat((caches[0], latent), dim=2), torch.cat((caches[1], k_rope), dim=2)

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.softmax(-1)


class Combined(Layer):
    """One cache, a row being latent and rotary key side by side."""

    def caches(self) -> tuple[Tensor, ...]:
        return (torch.cat(super().caches(), dim=-1),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        self.write(caches[0], latent, k_rope, place)
        return caches[0].split([self.sizes.rank, self.sizes.rope], dim=-1)

    def write(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        cache.index_copy_(2, place, torch.cat((latent, k_rope), dim=-1))


class CombinedInTwo(Combined):
    def write(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        cache[:, :, place, : self.sizes.rank] = latent
        cache[:, :, place, self.sizes.rank :] = k_rope


class CombinedKeysFirst(Combined):
    """The rotary keys are written first."""

    def write(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        cache[..., self.sizes.rank :].index_copy_(2, place, k_rope)
        cache[..., : self.sizes.rank].index_copy_(2, place, latent)


class CombinedByNumber(Combined):
    """In two, at a Python number."""

    def place(self) -> int:
        return self.sizes.start

    def write(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        end = place + self.sizes.tokens
        cache[:, :, place:end, : self.sizes.rank] = latent
        cache[:, :, place:end, self.sizes.rank :] = k_rope


class CombinedBySequence(Combined):
    """In two, each sequence at its own positions."""

    def place(self) -> Tensor:
        return super().place() + torch.arange(self.sizes.batch).unsqueeze(-1) % 2

    def write(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        sequences = torch.arange(self.sizes.batch).unsqueeze(-1)
        cache[:, 0, :, : self.sizes.rank][sequences, place] = latent.squeeze(1)
        cache[:, 0, :, self.sizes.rank :][sequences, place] = k_rope.squeeze(1)


class TwoCombined(TwoLayers, CombinedInTwo):
    each = CombinedInTwo


class TwoCombinedByNumber(TwoLayers, CombinedByNumber):
    each = CombinedByNumber


class TwoWhole(TwoLayers, Combined):
    each = Combined
