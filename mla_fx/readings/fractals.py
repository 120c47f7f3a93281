"""Pages in FRACTAL_NZ, [Blocks, Columns/n0, BlockSize, n0], read as [Blocks, BlockSize, Columns]."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import ZERO, Axis, Digit, Index, combine, of_axis
from .cache_places import CacheUpdate, Fractals
from .element import Element, resolve
from .reading import renamed
from .sizes import Size, product
from .views import shape_of


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
