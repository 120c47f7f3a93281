"""Rows that enter a cache, and where. Their spellings are read in `cache_update`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import ZERO, Axis, Index, axes_of, of_axis
from .element import Element
from .reading import Parts, Reading, renamed
from .sizes import Size, product
from .unproved import EQUAL, unproved
from .views import shape_of


@dataclass(frozen=True)
class Appended(Parts):
    """The program itself decides where rows go: `cat` appends them, or they are columns of wider rows."""


@dataclass(frozen=True)
class From(Parts):
    """Consecutive rows from a slot, which may be a symbol."""

    start: Size


@dataclass(frozen=True)
class At(Parts):
    """Each row has its slot, an element of a tensor of positions. With `wraps`, a negative slot counts from the end."""

    slot: Element
    wraps: bool


@dataclass(frozen=True)
class InBlocks(Parts):
    """Each row has its block and an offset in it; negative ones count from the end."""

    block: Element
    offset: Element


@dataclass(frozen=True)
class WholeBlocks(Parts):
    """Blocks are written whole: each has its number, and `offset` counts its rows. With `wraps`, a negative number
    counts from the end."""

    block: Element
    offset: Index
    wraps: bool


@dataclass(frozen=True)
class Fractals:
    """The dimensions of a value that count blocks, the rows of a block, and the columns of a row in two digits."""

    block: int
    row: int
    upper: int
    lower: int

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """In the order of FRACTAL_NZ, [Blocks, Columns/n0, BlockSize, n0]."""
        return self.block, self.upper, self.row, self.lower

    def index(self, node: Node, dims: Sequence[Index]) -> tuple[Index, ...]:
        """The index of the value for one of each of `dims`, which are in that order."""
        return tuple(dict(zip(self.dims, dims, strict=True)).get(dim, ZERO) for dim in range(len(shape_of(node))))


@dataclass(frozen=True)
class CacheUpdate(Reading):
    """Rows that are written into a value along dimension `dim`; `index` holds new indices for the whole value.

    `rows` are the new rows, read at `place` as the element `row` and counted along `token`; `where` says where they are
    written. Slots count through `across` dimensions: with more than one, through blocks and the offsets in a block.

    For wider rows, `index` and `row` describe some of the columns, and `rows` holds these. With `fractals`, which name
    the dimensions of the value, `index` is that of [Blocks, BlockSize, Columns]."""

    index: tuple[Index, ...]
    dim: int
    old: Node
    rows: Node
    place: tuple[Index, ...]
    row: Element
    token: Index
    where: Appended | From | At | InBlocks | WholeBlocks
    across: int = 1
    fractals: Fractals | None = None

    @property
    def is_paged(self) -> bool:
        return self.across > 1

    @property
    def is_appended(self) -> bool:
        return isinstance(self.where, Appended)

    @property
    def behind(self) -> int:
        """The first dimension after those that slots count through."""
        return self.dim + self.across

    def beside(self, other: Reading | None) -> CacheUpdate:
        """This update with its rows counted like those of another cache, if there is one. Raises NoMatch if their
        numbers differ."""
        if not isinstance(other, CacheUpdate):
            return self
        if self.is_paged != other.is_paged:
            raise NoMatch("only one of latent and rotary key is cached by blocks and offsets", self.node)
        names: dict[Axis, Index] = {}
        for own, same in zip(self._rows_and_slots(), other._rows_and_slots(), strict=True):
            mine, theirs = (product(axis.size for axis in axes) for axes in (own, same))
            if mine != theirs:
                because = "the caches of latent and rotary key have different numbers of rows or slots"
                raise NoMatch(because + unproved(self.node.graph, mine, EQUAL, theirs), self.node)
            if len(own) != len(same) or any(a.size != b.size for a, b in zip(own, same, strict=True)):
                raise NoMatch("the caches of latent and rotary key have different numbers of rows or slots", self.node)
            names.update(zip(own, map(of_axis, same), strict=True))
        return renamed(self, names)

    def _rows_and_slots(self) -> tuple[list[Axis], ...]:
        """The axes of sequences, slots and new rows, wherever they are; dimensions of one have none."""
        sequences = (*self.index[: self.dim], *self.index[self.behind : -1])
        slots = self.index[self.dim : self.behind]
        groups = sequences, slots, (self.token,)
        return tuple([axis for part in parts for axis in axes_of(part) or ()] for parts in groups)
