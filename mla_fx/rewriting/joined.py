"""Adjacent parts of one tensor as one element."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axes, Axis, Index, combine, composite, shifted, substitute, whole
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.sizes import Size, at_most, plain, product


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
