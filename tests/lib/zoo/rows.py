"""Ways in which new rows [B, S, width] enter a cache, and what the attention then reads, [B, T, width]."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .sizes import Sizes, Step


class Cache:
    """No cache: attention over the new rows alone. The methods above the line run outside the compiled module."""

    is_read_from_memory: ClassVar[bool] = False  # a cold prefill too reads the cache, not just the rows it wrote
    is_appended: ClassVar[bool] = False
    is_ragged: ClassVar[bool] = False
    steps: ClassVar[tuple[str, ...]] = ("prefill", "few")

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return None

    def caches(self, sizes: Sizes, step: Step) -> tuple[Tensor | None, ...]:
        return tuple(self.allocate(sizes, step, width) for width in (sizes.kv_rank, sizes.rope))

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        """A cache as [B, T, width]."""
        return cache

    def rows(self, caches: tuple[Any, ...], sizes: Sizes, step: Step) -> list[Tensor]:
        """What is cached, latents and rotary keys, each [B, T, width]."""
        widths = sizes.kv_rank, sizes.rope
        return [
            torch.zeros(step.batch, 0, width) if cache is None else self.logical(cache, step)
            for cache, width in zip(caches, widths, strict=True)
        ]

    def place(self, sizes: Sizes, step: Step) -> Any:
        """What says where the rows go."""
        return None

    def length(self, sizes: Sizes, step: Step) -> int:
        """T, the number of rows the attention reads."""
        return step.tokens

    # -----------------------------------------------------------------------------------------------------------------

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        """The cache afterwards, and the context."""
        return None, rows

    def store_both(
        self, caches: tuple[Any, ...], latent: Tensor, k_rope: Tensor, place: Any
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """The caches where those are new, latents and rotary keys."""
        latents_cache, latents = self.store(caches[0], latent, place)
        keys_cache, keys = self.store(caches[1], k_rope, place)
        return () if keys_cache is None else (latents_cache, keys_cache), latents, keys


class Appended(Cache):
    """transformers' DynamicCache: the old rows and the new ones."""

    is_appended = True
    steps = ("prefill", "decode", "few")

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch, step.start, width)

    def length(self, sizes: Sizes, step: Step) -> int:
        return step.start + step.tokens

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        context = torch.cat((cache, rows), dim=1)
        return context, context


class Written(Cache):
    """A cache of fixed length that is written in place and read whole."""

    is_read_from_memory = True
    steps = ("prefill", "decode", "few")

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch, sizes.context, width)

    def place(self, sizes: Sizes, step: Step) -> Any:
        return step.positions()[0].clone()

    def length(self, sizes: Sizes, step: Step) -> int:
        return sizes.context

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        self.write(cache, rows, place)
        return None, cache

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[:, place] = rows


class IndexCopy(Written):
    """transformers' StaticCache, [B, 1, T, width]."""

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch, 1, sizes.context, width)

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        return cache.squeeze(1)

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        cache.index_copy_(2, place, rows.unsqueeze(1))
        return None, cache.squeeze(1)


class TwoLayouts(IndexCopy):
    """Latents [B, T, R] and rotary keys [B, 1, T, Dr], as the one head that they have."""

    def caches(self, sizes: Sizes, step: Step) -> tuple[Tensor | None, ...]:
        latents, keys = super().caches(sizes, step)
        return None if latents is None else latents.squeeze(1), keys

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        return cache.squeeze(1) if cache.ndim == 4 else cache

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        if cache.ndim == 4:
            return super().store(cache, rows, place)
        cache.index_copy_(1, place, rows)
        return None, cache


class Batched(Written):
    """Each sequence is written at positions of its own."""

    is_ragged = True

    def place(self, sizes: Sizes, step: Step) -> Any:
        return step.positions(is_ragged=True)

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        sequences = torch.arange(rows.shape[0], device=rows.device)
        cache[sequences[:, None], place] = rows


class BatchedOne(Batched):
    """The same for one token, without the dimension of tokens."""

    steps = ("decode",)

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[torch.arange(rows.shape[0]), place[:, 0]] = rows[:, 0]


class Scattered(Batched):
    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache.scatter_(1, place.unsqueeze(-1).expand(-1, -1, rows.shape[-1]), rows)
