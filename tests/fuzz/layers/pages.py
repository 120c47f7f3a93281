"""Contexts in pages, [BlockNum, BlockSize, width]: a block table assigns them to sequences, for the write and the
read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Filled, Sink
from .plain import Layer

BLOCK = 2


class Pages(Layer):
    """The slots of new rows come from the table through which the context is gathered, too."""

    def tables(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return tuple(self.random(sizes.batch, 1, sizes.tokens, sizes.rope) for _ in range(2))

    def place(self) -> Any:
        sizes = self.sizes
        columns = sizes.context // BLOCK
        table = torch.randperm(sizes.batch * columns + 1, generator=self.draw)[1:].view(sizes.batch, columns)
        return table, super().place() + torch.arange(sizes.batch).unsqueeze(-1) % 2

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        lead = sizes.batch * sizes.context // BLOCK + 1, BLOCK
        return self.random(*lead, sizes.rank), self.random(*lead, sizes.rope)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        table, positions = place
        where = self.where(table, positions)
        for cache, rows in zip(caches, self.written(latent, k_rope), strict=True):
            self.write(cache, rows.squeeze(1), where)
        return tuple(self.gathered(cache, table).flatten(1, 2).unsqueeze(1) for cache in caches)

    def written(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, ...]:
        """The rows of each cache."""
        return latent, k_rope

    def where(self, table: Tensor, positions: Tensor) -> Any:
        return table.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK

    def write(self, cache: Tensor, rows: Tensor, slots: Any) -> None:
        cache.flatten(0, 1)[slots.flatten()] = rows.flatten(0, 1)

    def gathered(self, cache: Tensor, table: Tensor) -> Tensor:
        """[B, blocks, BlockSize, width]."""
        return cache[table]


class BlocksAndOffsets(Pages):
    def where(self, table: Tensor, positions: Tensor) -> Any:
        return table.gather(1, positions // BLOCK), positions % BLOCK

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        cache[place] = rows


class HeadsBeforeRows(BlocksAndOffsets):
    """[BlockNum, 1, BlockSize, width], as a cache with a dimension of heads lies in layout BNSD."""

    def caches(self) -> tuple[Tensor, ...]:
        return tuple(cache.unsqueeze(1) for cache in super().caches())

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        blocks, offsets = place
        cache[blocks, 0, offsets] = rows

    def gathered(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table].squeeze(2)


class CountedTwice(Pages):
    """Each cache has its slots computed anew."""

    def where(self, table: Tensor, positions: Tensor) -> Any:
        return table, positions

    def write(self, cache: Tensor, rows: Tensor, place: Any) -> None:
        super().write(cache, rows, super().where(*place))


class TwoTables(Pages):
    """Rows are written through one table and read through another with the same blocks in another order."""

    def place(self) -> Any:
        table, positions = super().place()
        return table, table.flip(1), positions

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        written, read, positions = place
        super().store(caches, latent, k_rope, (written, positions))
        return tuple(self.gathered(cache, read).flatten(1, 2).unsqueeze(1) for cache in caches)


class SinkPages(Pages, Sink):
    pass


class FilledPages(Pages, Filled):
    pass


class CombinedPages(Pages):
    """Latents and rotary keys side by side in one cache, a row being written in one piece."""

    def caches(self) -> tuple[Tensor, ...]:
        return (torch.cat(super().caches(), dim=-1),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        table, positions = place
        self.write_both(caches[0], latent.squeeze(1), k_rope.squeeze(1), self.where(table, positions))
        context = self.gathered(caches[0], table).flatten(1, 2).unsqueeze(1)
        return context.split([self.sizes.rank, self.sizes.rope], dim=-1)

    def write_both(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        self.write(cache, torch.cat((latent, k_rope), dim=-1), place)


class CombinedPagesInTwo(CombinedPages, BlocksAndOffsets):
    """Each row is written in two pieces."""

    def write_both(self, cache: Tensor, latent: Tensor, k_rope: Tensor, place: Any) -> None:
        cache[..., : self.sizes.rank][place] = latent
        cache[..., self.sizes.rank :][place] = k_rope
