"""Operands made of several values: adjacent parts of one tensor, rotary tables, and attention in parts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.ops.common.math import nan_where_blind
from mla_fx.readings.axes import Axes, Axis, Dims, Index, axes, combine, composite, of_axis, shifted, substitute, whole
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.reading import renamed
from mla_fx.readings.rope import Rope, Table
from mla_fx.readings.sizes import Size, at_most, plain, product

from .materialize import tensor
from .plan import Call, Expression, Inlined, Representative

aten = torch.ops.aten


@dataclass(frozen=True)
class Joined:
    """Two adjacent parts of one tensor as one element, read along `axis`, which counts the columns of both."""

    element: Element
    axis: Axis


def joined(first: Element, columns: Axes, second: Element, others: Axes) -> Joined | None:
    """`first` along its columns and then `second` along its own, if they are adjacent in one tensor; else None."""
    (node, left, factor), (other, right, other_factor) = _source(first), _source(second)
    if node is not other or (factor, other_factor) != (1.0, 1.0) or len(columns) > 1 or len(others) > 1:
        return None
    start, stop = (product(axis.size for axis in part) for part in (columns, others))
    axis = Axis(start + stop)
    here, behind = {axis: composite(columns)}, {axis: shifted(composite(others), start)}
    index: list[Index] = []
    for mine, theirs in zip(left, right, strict=True):
        rest = [term for term in mine.terms if term[0].axis not in columns]
        both = combine(mine.offset, [*rest, (whole(axis), _stride(mine, columns, theirs, others))])
        if (substitute(both, here), substitute(both, behind)) != (mine, theirs):
            return None
        index.append(both)
    return Joined(resolve(node, tuple(index)), axis) if sum(axis in part.axes for part in index) == 1 else None


def _stride(mine: Index, columns: Axes, theirs: Index, others: Axes) -> Size:
    """The distance of neighbouring columns in a dimension. If each part has one column, the distance of these two."""
    for part, found in ((mine, columns), (theirs, others)):
        if found:
            return dict(part.terms).get(whole(found[0]), 0)
    distance = plain(theirs.offset - mine.offset)
    return distance if at_most(1, distance) else 0


def joined_parts(one: Element, columns: Axes, other: Element, others: Axes, what: str) -> tuple[Element, Axes]:
    """Two parts as one, and the columns of both. Raises NoMatch if they are not adjacent."""
    whole = joined(one, columns, other, others)
    if whole is None:
        raise NoMatch(f"{what} are {_apart(one, other)}", other.origin)
    return whole.element, (whole.axis,)


def _apart(one: Element, other: Element) -> str:
    if one.origin is other.origin:
        return "not adjacent in one matrix"
    return "two parameters; the operator takes one matrix, which would be a copy of both"


def _source(part: Element) -> tuple[Node, tuple[Index, ...], float]:
    """The node, index and factor of a part: its rounded value if it is rounded, because no rounding may be lost."""
    return part.as_operand if part.roundings else (part.origin, part.index, part.factor)


def table(found: Table, pair: Index, outer: Dims, *, expand: bool = False) -> Expression:
    """cos or sin with all columns, [*outer, Dr]: those of the pairs' first elements, then those of the second ones.

    A dimension in which the table is the same has one element, or all of them with `expand`."""
    pairs = axes(pair, "a rotary table", found.node)
    first, second = found.first, found.second
    if len(pairs) == 1:
        other = Axis(pairs[0].size)
        whole_table = joined(first, pairs, renamed(second, {pairs[0]: of_axis(other)}), (other,))
        if whole_table is not None:
            return tensor(whole_table.element, [*outer, [whole_table.axis]], dtype=first.stored.dtype, expand=expand)
    return Call(aten.cat.default, [tensor(half, [*outer, pairs], expand=True) for half in (first, second)], -1)


def tables(
    rotation: Rope | None, names: Sequence[str], outer: Dims, *, equal: Rope | None = None, expand: bool = False
) -> list[Expression | None]:
    """The tables with the given names, each None if there is no rotation.

    They also replace those of `equal`, a rotation by equal tables."""
    if rotation is None:
        return [None for _ in names]
    found: list[Expression] = [table(getattr(rotation, name), rotation.pair, outer, expand=expand) for name in names]
    others: list[Table] = [] if equal is None else [getattr(equal, name) for name in names]
    alike = [(part.first.origin, part.second.origin) for part in others]
    return [*map(Representative, found, alike)] if alike else [*found]


def merged(
    outs: Sequence[Expression], lses: Sequence[Expression], blanks: Iterable[Expression], blank_if_empty: bool
) -> Expression:
    """A call of merge_attention. Rows are NaN that have minus infinity among `blanks`, logarithms of some parts, and if
    `blank_if_empty` rows that no part sees; others that no part sees are zero."""
    call = Call(torch.ops.mla_fx.merge_attention.default, outs, lses)
    value: Expression = Call(operator.getitem, call, 0)
    blanks = list(blanks)
    if blank_if_empty and not blanks:
        blanks.append(Call(operator.getitem, call, 1))
    for blank in blanks:
        value = Inlined(nan_where_blind, (value, blank))
    return value
