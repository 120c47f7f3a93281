"""Where a value is read, if another reading of it runs over some of its dimensions: in a norm, or in a maximum."""

from __future__ import annotations

from .axes import Axis, Index, combine, digits_of, extent, subtract
from .element import Element
from .sizes import ratio


def read_along(outside: Element, inside: Element, over: tuple[Index, ...]) -> tuple[Index, ...] | None:
    """The indices of `outside` where `inside` runs over those of `over`, if both read one value and are otherwise
    equal; else None."""
    if outside.node is not inside.node or outside.roundings != inside.roundings:
        return None
    runs = [part.axis for part in over if part.axis is not None]
    read: dict[Axis, Index] = {}
    for mine, theirs in zip(outside.index, inside.index, strict=True):
        here = [axis for axis in runs if axis in theirs.axes]
        run = _solved(mine, theirs, here[0]) if len(here) == 1 and here[0] not in read else None
        if run is not None:
            read[here[0]] = run
        elif mine != theirs:
            return None
    fixed = [digit for part in inside.index for digit in part.digits if digit.axis not in runs]
    moving = [digit for run in read.values() for digit in run.digits]
    if len(read) != len(runs) or any(digit.overlaps(other) for digit in moving for other in fixed):
        return None
    return tuple(read[axis] for axis in runs)


def _solved(mine: Index, theirs: Index, axis: Axis) -> Index | None:
    """The part of `mine` at the place of `axis` in `theirs`, if it counts in the same way; else None."""
    terms = [(digit, stride) for digit, stride in theirs.terms if digit.axis is axis]
    rest = combine(theirs.offset, [term for term in theirs.terms if term not in terms])
    left = subtract(mine, rest)
    if left is None or len(terms) != 1 or not terms[0][0].is_whole:
        return None
    strides = [ratio(stride, terms[0][1]) for _, stride in left.terms]
    if left.offset != 0 or None in strides:
        return None
    run = combine(0, [(digit, stride) for (digit, _), stride in zip(left.terms, strides, strict=True)])
    return run if digits_of(run) is not None and extent(run) == axis.size else None
