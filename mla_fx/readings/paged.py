"""Rows gathered from pages: a cache indexed by a block table or by slots, index_select, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.integers import INTEGERS, IntegerSum, integer_sum

from .axes import ZERO, Axes, Axis, Index, axes, combine, fresh, of_axis, whole
from .calls import args_of
from .codes.dequantised import Dequantised, codes_behind, dequantised
from .element import Element, element_of, operand, resolve
from .reading import Reading
from .sizes import Size, at_most, ratio
from .views import covers, shape_of

aten = torch.ops.aten

INDEXED = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
GATHERS = INDEXED | {aten.index_select.default, aten.embedding.default}


@dataclass(frozen=True)
class Paged(Reading):
    """`pages`, read along `block` at the number in `table`. The rest of the index of `pages` comes from the reader of
    the gathered rows. With `wraps`, a negative number counts blocks from the end; otherwise the program refuses it. If
    rows hold codes, `numbers` are what the program computes from them. If bytes of rows are read as elements of another
    dtype, this is `viewed`, and `byte` counts those of one element."""

    pages: Element
    block: Index
    table: Element
    wraps: bool
    numbers: Dequantised | None = None
    viewed: torch.dtype | None = None
    byte: Index = ZERO

    @property
    def axes(self) -> Axes:
        """Those that count blocks."""
        return axes(self.block, "the blocks", self.node)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows, or of what is computed from their codes."""
        return self.pages.dtype if self.numbers is None else self.numbers.dtype

    def blocks_and_rows(self, context: Sequence[Axis]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes of a context that select blocks, and those within a block. Raises NoMatch if the rows of a block are
        not consecutive, or are read repeatedly."""
        blocks = tuple(axis for axis in context if axis in self.table.axes)
        rows = tuple(axis for axis in context if axis not in blocks)
        if not {*rows, *self.block.axes} <= self.pages.axes:
            raise NoMatch("the context repeats one block or one row", self.node)
        if (*blocks, *rows) != tuple(context):
            raise NoMatch("the rows of a block are not consecutive in the context", self.node)
        return blocks, rows


class _Gather(NamedTuple):
    """Where a gathered element comes from: an index per dimension, and for some dimensions a number that is looked
    up."""

    source: Node
    at: list[Index]
    numbers: dict[int, Element]


def paged(element: Element, *, is_widened: bool = False) -> Paged:
    """Read an element as one of a row that was looked up in pages. Raises NoMatch if it is not one, or if it is read in
    another dtype than the pages have. It may be widened with `is_widened`, which changes no number."""
    node = element.node
    if node.target is aten.view.dtype and not element.roundings:
        return _viewed(element)
    if element.roundings or (element.dtype != node.meta["val"].dtype and not is_widened):
        cast = (*element.roundings, element.dtype)[0]
        raise NoMatch(f"rows are gathered in {node.meta['val'].dtype} and cast to {cast}", node)
    found = _gather(node, element.index)
    looked_up: list[tuple[Index, Element]] = []
    for dim, number in found.numbers.items():
        found.at[dim], table = _pointed_at(integer_sum(number), number, shape_of(found.source)[dim])
        looked_up += [] if table is None else [table]
    if len(looked_up) != 1:
        raise NoMatch(f"rows are gathered by {len(looked_up)} tables, expected one block table", node)
    return Paged(node, resolve(found.source, tuple(found.at)), *looked_up[0], wraps=node.target in INDEXED)


def _viewed(element: Element) -> Paged:
    """Read the bytes of an element in rows that were looked up in pages."""
    source, dtype = args_of(element.node)
    width = ratio(dtype.itemsize, source.meta["val"].dtype.itemsize)
    if width is None or element.dtype != dtype:
        raise NoMatch(f"rows are gathered in {source.meta['val'].dtype} and read as {dtype}", element.node)
    *lead, column = element.index
    byte = fresh(width)
    wide = combine(width * column.offset, [*((digit, width * stride) for digit, stride in column.terms), *byte.terms])
    return replace(paged(resolve(source, (*lead, wide))), node=element.node, viewed=dtype, byte=byte)


def is_looked_up(element: Element) -> bool:
    """Whether an element seems to be one of rows that were looked up, or bytes of one."""
    origin = element.origin
    if origin.target is aten.view.dtype:
        return is_looked_up(element_of(args_of(origin)[0]))
    return origin.target in GATHERS


def paged_numbers(element: Element) -> Paged:
    """Read an element of a row in the dtype of the pages or a wider one, or one that is dequantised from a row."""
    if gathered_codes(element) in (None, element):
        return paged(element, is_widened=True)
    found = dequantised(element)
    return replace(paged(found.codes), numbers=found)


def gathered_codes(element: Element) -> Element | None:
    """The codes in gathered rows from which an element seems to be dequantised, if it does."""
    found = codes_behind(element)
    return found if found is not None and found.origin.target in GATHERS else None


def _pointed_at(total: IntegerSum, number: Element, size: Size) -> tuple[Index, tuple[Index, Element] | None]:
    """What a number of a dimension points to, and the element that is looked up for it. It points to blocks, with as
    many rows as the looked-up number is multiplied by, and a counted row in them; or to single rows."""
    counts_up = all(at_most(0, stride) for _, stride in total.index.terms)
    if not total.elements and counts_up and covers(total.index, 0, size):
        return total.index, None
    table, times = next(iter(total.elements), (number, 1))
    is_in_block = counts_up and covers(total.index, 0, times)
    blocks = ratio(size, times) if at_most(1, times) else None
    if len(total.elements) != 1 or not is_in_block or blocks is None:
        table, times, blocks, total = number, 1, size, IntegerSum(Index())
    block = Axis(blocks)
    return combine(total.index.offset, [(whole(block), times), *total.index.terms]), (of_axis(block), table)


def _gather(node: Node, index: tuple[Index, ...]) -> _Gather:
    if node.target is aten.index_select.default:
        source, dim, where = args_of(node)[:3]
        return _looked_up(node, index, source, [None] * (dim % len(index)) + [where])
    if node.target is aten.embedding.default:
        return _looked_up(node, index, args_of(node)[0], [args_of(node)[1]])
    if node.target in INDEXED:
        return _looked_up(node, index, args_of(node)[0], args_of(node)[1])
    raise NoMatch(f"expected gathered rows, found {name_of(node)}", node)


def _looked_up(node: Node, index: tuple[Index, ...], source: Node, places: Sequence[Node | None]) -> _Gather:
    """Replace the looked-up dimensions by those of the indices, which come first if dimensions are not adjacent."""
    tables = {dim: where for dim, where in enumerate(places) if where is not None}
    is_adjacent = max(tables) + 1 - min(tables) == len(tables)
    first = min(tables) if is_adjacent else 0
    if any(where.meta["val"].dtype not in INTEGERS for where in tables.values()):
        raise NoMatch("rows are gathered by a boolean mask, not by index", node)
    rank = max(len(shape_of(where)) for where in tables.values())
    lead = index[first : first + rank]
    others = iter([*index[:first], *index[first + rank :]])
    whole_index = [Index() if dim in tables else next(others) for dim in range(len(shape_of(source)))]
    return _Gather(source, whole_index, {dim: operand(where, lead) for dim, where in tables.items()})
