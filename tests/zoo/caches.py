"""How new rows [B, S, width] enter a cache, and what the attention then reads, [B, T, width]."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .sizes import Sizes, Step


class Cache:
    """No cache: attention over the new rows alone. The methods above the line run outside the compiled module."""

    is_read_from_memory: ClassVar[bool] = False  # a cold prefill too reads the cache, not just the rows it wrote
    is_ragged: ClassVar[bool] = False
    steps: ClassVar[tuple[str, ...]] = ("prefill", "few")

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return None

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        """A cache as [B, T, width]."""
        return cache

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


class Appended(Cache):
    """transformers' DynamicCache: the old rows and the new ones."""

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


class Slots(Written):
    """Paged, [BlockNum, BlockSize, width], written through a flat view. Each sequence owns neighbouring blocks."""

    is_ragged = True

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch * sizes.context // sizes.block, sizes.block, width)

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        return cache.view(step.batch, -1, cache.shape[-1])

    def place(self, sizes: Sizes, step: Step) -> Any:
        first = sizes.context * torch.arange(step.batch).unsqueeze(1)
        return (first + step.positions(is_ragged=True)).flatten()

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        self.write(cache, rows.reshape(-1, rows.shape[-1]), place)
        return None, cache.view(rows.shape[0], -1, rows.shape[-1])

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache.view(-1, cache.shape[-1])[place] = rows


class BlocksAndOffsets(Slots):
    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[place // cache.shape[1], place % cache.shape[1]] = rows


class Slice(Written):
    """DeepSeek's model.py: a Python number says where, and only the rows up to there are read."""

    is_read_from_memory = False

    def place(self, sizes: Sizes, step: Step) -> Any:
        return step.start

    def length(self, sizes: Sizes, step: Step) -> int:
        return step.start + step.tokens

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        end = place + rows.shape[1]
        self.write(cache, rows, place)
        return None, cache[: rows.shape[0], :end]

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[: rows.shape[0], place : place + rows.shape[1]] = rows


class RoomySlice(Slice):
    """The same with a cache for more sequences than there are."""

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch + 3, sizes.context, width)

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        return cache[: step.batch]


class NarrowCopy(Slice):
    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache.narrow(1, place, rows.shape[1]).copy_(rows)


class SliceScatter(Slice):
    """The same as one expression, copied back."""

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        batch = rows.shape[0]
        written = torch.slice_scatter(cache[:batch], rows, 1, place, place + rows.shape[1])
        cache.copy_(torch.slice_scatter(cache, written, 0, 0, batch))


class OneRow(Slice):
    """One token, without the dimension of tokens."""

    steps = ("decode",)

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[:, place] = rows[:, 0]


class Counted(Slice):
    """Each cache counts its positions anew."""

    is_read_from_memory = True

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[:, place + torch.arange(rows.shape[1])] = rows


class SliceReadWhole(Slice):
    is_read_from_memory = True

    def length(self, sizes: Sizes, step: Step) -> int:
        return sizes.context

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        cache[:, place : place + rows.shape[1]].copy_(rows)
        return None, cache


CACHES = {
    "none": Cache(),
    "appended": Appended(),
    "index_copy": IndexCopy(),
    "index_put": Written(),
    "batched": Batched(),
    "batched_one": BatchedOne(),
    "scattered": Scattered(),
    "slots": Slots(),
    "blocks_and_offsets": BlocksAndOffsets(),
    "slice": Slice(),
    "roomy_slice": RoomySlice(),
    "narrow_copy": NarrowCopy(),
    "slice_read_whole": SliceReadWhole(),
    "slice_scatter": SliceScatter(),
    "one_row": OneRow(),
    "counted": Counted(),
}
