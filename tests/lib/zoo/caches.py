"""Caches in slots, pages and slices, and all caches by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .rows import Appended, Batched, BatchedOne, Cache, IndexCopy, Scattered, TwoLayouts, Written
from .sizes import Sizes, Step


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


class Paged(Slots):
    """The blocks of a sequence lie anywhere, and a table says where: what is read is gathered through it."""

    def table(self, sizes: Sizes, step: Step) -> Tensor:
        """[B, T / BlockSize], with a block that nobody owns."""
        generator = torch.Generator().manual_seed(3)
        columns = sizes.context // sizes.block
        return torch.randperm(step.batch * columns + 1, generator=generator)[1:].view(step.batch, columns)

    def allocate(self, sizes: Sizes, step: Step, width: int) -> Tensor | None:
        return torch.randn(step.batch * sizes.context // sizes.block + 1, sizes.block, width)

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        sizes = Sizes(context=(cache.shape[0] - 1) // step.batch * cache.shape[1], block=cache.shape[1])
        return cache[self.table(sizes, step)].flatten(1, 2)

    def place(self, sizes: Sizes, step: Step) -> Any:
        positions, table = step.positions(is_ragged=True), self.table(sizes, step)
        slots = table.gather(1, positions // sizes.block) * sizes.block + positions % sizes.block
        return slots.flatten(), table

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        slots, table = place
        self.write(cache, rows.reshape(-1, rows.shape[-1]), slots)
        return None, self.read(cache, table).reshape(rows.shape[0], -1, rows.shape[-1])

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table]


class BlocksSelected(Paged):
    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[place // cache.shape[1], place % cache.shape[1]] = rows

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.index_select(0, table.flatten())


class BlocksEmbedded(Paged):
    def place(self, sizes: Sizes, step: Step) -> Any:
        slots, table = super().place(sizes, step)
        return slots, table.int()

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(table, cache.flatten(1))


class SlotsOfTable(Paged):
    """Each row is looked up, by a slot that is computed from the table."""

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        slots = table.unsqueeze(-1) * cache.shape[1] + torch.arange(cache.shape[1])
        return cache.flatten(0, 1)[slots.flatten(1)]


class OffsetsInBlocks(Paged):
    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table.unsqueeze(-1), torch.arange(cache.shape[1])]


class Nz(Paged):
    """The blocks in FRACTAL_NZ, in which 32 bytes of a row lie side by side, as [Columns/n0, BlockSize, n0]."""

    def form(self, cache: Tensor, width: int) -> Tensor:
        """The same memory as the cache [BlockNum, BlockSize, Columns]."""
        lanes = 32 // cache.element_size()
        return cache.view(cache.shape[0], width // lanes, cache.shape[1], lanes)

    def logical(self, cache: Tensor, step: Step) -> Tensor:
        return super().logical(Nz.form(self, cache, cache.shape[2]).transpose(1, 2).flatten(2), step)

    def store(self, cache: Any, rows: Tensor, place: Any) -> tuple[Any, Tensor]:
        (slots, table), width = place, rows.shape[-1]
        nz = self.form(cache, width)
        block, offset = slots // cache.shape[1], slots % cache.shape[1]
        self.put(nz, rows.reshape(-1, width // nz.shape[-1], nz.shape[-1]), block, offset)
        return None, self.read(nz, table).reshape(rows.shape[0], -1, width)

    def put(self, nz: Tensor, rows: Tensor, block: Tensor, offset: Tensor) -> None:
        nz[block, :, offset] = rows

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table].transpose(2, 3)


class NzTransposed(Nz):
    """Written and read through a view whose first dimensions are blocks and offsets."""

    def put(self, nz: Tensor, rows: Tensor, block: Tensor, offset: Tensor) -> None:
        nz.transpose(1, 2)[block, offset] = rows

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.transpose(1, 2)[table]


class NzOneHead(Nz):
    """The blocks [1, Columns/n0, BlockSize, n0], as the vendor's attention takes them."""

    def form(self, cache: Tensor, width: int) -> Tensor:
        return super().form(cache, width).unsqueeze(1)

    def put(self, nz: Tensor, rows: Tensor, block: Tensor, offset: Tensor) -> None:
        nz[block, :, :, offset] = rows.unsqueeze(1)

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.index_select(0, table.flatten()).permute(0, 1, 3, 2, 4)


class SlotsGiven(Paged):
    """Each row is looked up by a slot of its own, as blocks of one row would be."""

    def place(self, sizes: Sizes, step: Step) -> Any:
        slots, table = super().place(sizes, step)
        return slots, (table.unsqueeze(-1) * sizes.block + torch.arange(sizes.block)).flatten(1)

    def read(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.view(-1, cache.shape[-1])[table]


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


class Combined(Cache):
    """One cache for both, a row being latent and rotary key side by side, written as `inner` is."""

    def __init__(self, inner: Cache) -> None:
        self.inner = inner
        self.is_read_from_memory, self.is_ragged, self.steps = inner.is_read_from_memory, inner.is_ragged, inner.steps
        self.place, self.length = inner.place, inner.length

    def caches(self, sizes: Sizes, step: Step) -> tuple[Tensor | None, ...]:
        return (self.inner.allocate(sizes, step, sizes.kv_rank + sizes.rope),)

    def rows(self, caches: tuple[Any, ...], sizes: Sizes, step: Step) -> list[Tensor]:
        return list(self.inner.logical(caches[0], step).split((sizes.kv_rank, sizes.rope), dim=-1))

    def store_both(
        self, caches: tuple[Any, ...], latent: Tensor, k_rope: Tensor, place: Any
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        cache, context = self.inner.store(caches[0], torch.cat((latent, k_rope), dim=-1), place)
        return () if cache is None else (cache,), *context.split((latent.shape[-1], k_rope.shape[-1]), dim=-1)


class InTwo(Combined):
    """The same, written in two."""

    def store_both(
        self, caches: tuple[Any, ...], latent: Tensor, k_rope: Tensor, place: Any
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        halves = caches[0][..., : latent.shape[-1]], caches[0][..., latent.shape[-1] :]
        return self.inner.store_both(halves, latent, k_rope, place)


CACHES = {
    "none": Cache(),
    "appended": Appended(),
    "index_copy": IndexCopy(),
    "two_layouts": TwoLayouts(),
    "index_put": Written(),
    "batched": Batched(),
    "batched_one": BatchedOne(),
    "scattered": Scattered(),
    "slots": Slots(),
    "blocks_and_offsets": BlocksAndOffsets(),
    "paged": Paged(),
    "blocks_selected": BlocksSelected(),
    "blocks_embedded": BlocksEmbedded(),
    "slots_of_table": SlotsOfTable(),
    "offsets_in_blocks": OffsetsInBlocks(),
    "slots_given": SlotsGiven(),
    "nz": Nz(),
    "nz_transposed": NzTransposed(),
    "nz_one_head": NzOneHead(),
    "slice": Slice(),
    "roomy_slice": RoomySlice(),
    "narrow_copy": NarrowCopy(),
    "slice_read_whole": SliceReadWhole(),
    "slice_scatter": SliceScatter(),
    "one_row": OneRow(),
    "counted": Counted(),
    "combined": Combined(IndexCopy()),
    "combined_slots": Combined(Slots()),
    "combined_blocks": Combined(BlocksAndOffsets()),
    "combined_slice": Combined(Slice()),
    "combined_appended": Combined(Appended()),
    "combined_in_two": InTwo(IndexCopy()),
    "combined_paged": Combined(BlocksSelected()),
    "combined_slots_in_two": InTwo(Slots()),
}
