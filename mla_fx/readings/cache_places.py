"""Rows that enter a cache, and where. Their spellings are read in `cache_update`. Pages in FRACTAL_NZ, [Blocks,
Columns/n0, BlockSize, n0], are read as [Blocks, BlockSize, Columns]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import ZERO, Axis, Digit, Index, axes_of, combine, of_axis
from .element import Element, resolve
from .equal_sizes import EQUAL, unproved
from .reading import Parts, Reading, renamed
from .sizes import Size, product
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


def sizes_of_rows(pages: Node, rank: int) -> tuple[Size, ...]:
    """The shape of an operand of this rank. Its pages may have a dimension more."""
    sizes = shape_of(pages)
    if len(sizes) == rank:
        return sizes
    blocks, bands, rows, lanes = sizes
    return blocks, rows, product((bands, lanes))


def element_of_rows(pages: Node, index: tuple[Index, ...]) -> Element:
    """The element of an operand at an index of that shape."""
    if len(index) == len(shape_of(pages)):
        return resolve(pages, index)
    block, row, column = index
    _, bands, _, lanes = shape_of(pages)
    upper, lower = (ZERO, ZERO) if column.axis is None else _digits(column.axis, bands, lanes)
    return resolve(pages, (block, upper, row, lower))


def _digits(column: Axis, bands: Size, lanes: Size) -> tuple[Index, Index]:
    upper, lower = (combine(0, [(digit, 1)]) for digit in (Digit(column, lanes, bands), Digit(column, 1, lanes)))
    return upper, lower


def in_fractals(update: CacheUpdate, block: int, row: int) -> CacheUpdate:
    """An update along two dimensions as one of [Blocks, BlockSize, Columns], whose columns are in two others, the last
    one being the faster. The given `index` has a part for each dimension of the value.

    Raises NoMatch if the columns are in other dimensions."""
    last, node = len(update.index) - 1, update.node
    wide = [dim for dim in range(last) if dim not in (block, row) and update.index[dim].terms]
    if last in (block, row) or len(wide) != 1:
        raise NoMatch("the cache is written at positions along several dimensions", node)
    found = Fractals(block, row, wide[0], last)
    bands, lanes = (shape_of(node)[dim] for dim in (found.upper, found.lower))
    column = Axis(product((bands, lanes)))
    dims = (update.index[dim].axis for dim in (found.upper, found.lower))
    digits = zip(dims, _digits(column, bands, lanes), strict=True)
    names = {axis: digit for axis, digit in digits if axis is not None}
    read = resolve(update.rows, renamed(update.place, names))
    rows, place = read.seen  # where the columns are one dimension
    if any(sum(digit.axis is column for digit, _ in part.terms) > 1 for part in read.index):
        raise NoMatch("the columns of a row enter the cache in another order than they have in the row", node)
    index = update.index[block], update.index[row], of_axis(column)
    return replace(update, index=index, dim=0, rows=rows, place=place, row=read, across=2, fractals=found)
