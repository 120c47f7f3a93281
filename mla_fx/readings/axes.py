"""Index arithmetic over axes: the offset and strides with which a value's dimension is read.

An axis is a loop variable and never changes. A dimension that holds only part of it, for example after a reshape, reads
a *digit* of it: with an axis of 12 over a tensor of [3, 4], `axis // 4 % 3` reads the rows and `axis % 4` the columns.
Indices have one normal form, so equal reads are equal values, in whatever order they were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from torch.fx import Node

from mla_fx.errors import NoMatch

from .sizes import Size, at_most, multiples, plain, ratio, strides_of

_serial = itertools.count()


class Axis:
    """One loop variable, from 0 up to `size`."""

    __slots__ = ("serial", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.serial = next(_serial)

    def __repr__(self) -> str:
        return f"a{self.serial}:{self.size}"


Axes = tuple[Axis, ...]
Dims = Sequence[Sequence[Axis]]


class Digit(NamedTuple):
    """`axis // below % size`: one digit of an axis written as a mixed-radix number."""

    axis: Axis
    below: Size
    size: Size

    @property
    def is_whole(self) -> bool:
        return bool(self.below == 1 and self.size == self.axis.size)

    def split(self, inner: Size) -> tuple[Digit, Digit]:
        """Split the digit into two; the lower one has `inner` values."""
        outer = Digit(self.axis, plain(self.below * inner), ratio(self.size, inner))
        return outer, Digit(self.axis, self.below, inner)

    def overlaps(self, other: Digit) -> bool:
        """Whether the two digits cannot vary independently."""
        apart = at_most(self.below * self.size, other.below) or at_most(other.below * other.size, self.below)
        return self.axis is other.axis and not apart

    def __repr__(self) -> str:
        return repr(self.axis) if self.is_whole else f"{self.axis!r}//{self.below}%{self.size}"


Term = tuple[Digit, Size]


class Index(NamedTuple):
    """`offset + sum(stride * digit)`: where one dimension is read. `combine` makes it; indices are equal if they read
    the same."""

    offset: Size = 0
    terms: tuple[Term, ...] = ()

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(digit.axis for digit, _ in self.terms)

    @property
    def digits(self) -> frozenset[Digit]:
        return frozenset(digit for digit, _ in self.terms)

    @property
    def axis(self) -> Axis | None:
        """The one axis that this index reads from its start in steps of one; None otherwise."""
        if self.offset != 0 or len(self.terms) != 1:
            return None
        digit, stride = self.terms[0]
        return digit.axis if stride == 1 and digit.is_whole else None


ZERO = Index()


def one_axis(over: Sequence[Index]) -> Axis | None:
    """The axis of a reduction over one dimension; None of others."""
    return over[0].axis if len(over) == 1 else None


def whole(axis: Axis) -> Digit:
    return Digit(axis, 1, axis.size)


def of_axis(axis: Axis, stride: Size = 1, offset: Size = 0) -> Index:
    return combine(offset, [(whole(axis), stride)])


def fresh(size: Size) -> Index:
    """A new axis over a dimension of `size`; a dimension of one element needs none."""
    return ZERO if size == 1 else of_axis(Axis(size))


def combine(offset: Size, terms: Iterable[Term]) -> Index:
    """An index from loose terms: adds up equal digits, joins adjacent ones, drops those of size 1."""
    total: dict[Digit, Size] = {}
    for digit, stride in terms:
        if digit.size != 1:
            total[digit] = plain(total[digit] + stride) if digit in total else stride
    if 0 in total.values():
        total = {digit: stride for digit, stride in total.items() if stride != 0}
    if len(total) < 2:
        return Index(plain(offset), tuple(total.items()))
    if len({digit.axis for digit in total}) < len(total):
        return Index(plain(offset), tuple(sorted(_joined(total).items(), key=_term_order)))
    return Index(plain(offset), tuple(sorted(total.items(), key=_serial_of)))


def _serial_of(term: Term) -> int:
    return term[0].axis.serial


def _term_order(term: Term) -> tuple[int, str]:
    """Any order works that is the same for equal digits."""
    digit, _ = term
    return digit.axis.serial, str(digit.below)


def _joined(terms: dict[Digit, Size]) -> dict[Digit, Size]:
    """Join digits that are adjacent in an axis and have matching strides."""
    for upper, lower in itertools.permutations(terms, 2):
        is_above = upper.axis is lower.axis and upper.below == lower.below * lower.size
        if is_above and terms[upper] == terms[lower] * lower.size:
            rest = {digit: stride for digit, stride in terms.items() if digit not in (upper, lower)}
            both = Digit(lower.axis, lower.below, plain(lower.size * upper.size))
            return _joined({**rest, both: terms[lower]})
    return terms


def shifted(index: Index, by: Size, step: Size = 1) -> Index:
    """`by + step * index`: how a slice reads its dimension."""
    return Index(plain(by + step * index.offset), tuple((digit, plain(step * stride)) for digit, stride in index.terms))


def composite(axes: Sequence[Axis]) -> Index:
    """Several axes read as one dimension, the first varying slowest."""
    strides = strides_of([axis.size for axis in axes])
    return combine(0, [(whole(axis), stride) for axis, stride in zip(axes, strides, strict=True)])


def extent(index: Index) -> Size:
    """One more than the index's furthest position after its offset."""
    # Multiplied out, so that symbols cancel.
    return plain(1 + sum((stride * digit.size - stride for digit, stride in index.terms), 0))


def slowest_first(terms: Iterable[Term]) -> list[Term] | None:
    """The terms by descending stride; None if it is unknown which of two is larger."""
    ordered: list[Term] = []
    for term in terms:
        position = 0
        while position < len(ordered) and at_most(term[1], ordered[position][1]):
            position += 1
        if position < len(ordered) and not at_most(ordered[position][1], term[1]):
            return None
        ordered.insert(position, term)
    return ordered


def digits_of(index: Index) -> tuple[Digit, ...] | None:
    """The digits that make up this index, slowest first; None if it does not count through all of them."""
    if index.axis is not None:
        return (index.terms[0][0],)
    ordered = slowest_first(index.terms)
    if ordered is None or index.offset != 0:
        return None
    strides = strides_of([digit.size for digit, _ in ordered])
    is_dense = all(stride == dense for (_, stride), dense in zip(ordered, strides, strict=True))
    return tuple(digit for digit, _ in ordered) if is_dense else None


def axes_of(index: Index) -> tuple[Axis, ...] | None:
    """The axes that make up this index, slowest first; None if it is not a dimension over whole axes."""
    digits = digits_of(index)
    return None if digits is None or not all(digit.is_whole for digit in digits) else tuple(d.axis for d in digits)


def axes(index: Index, what: str, node: Node) -> Axes:
    """The axes that a dimension runs over, slowest first. Raises NoMatch if they are not whole axes."""
    found = axes_of(index)
    if found is None:
        raise NoMatch(f"{what} is read in steps or from an offset, not as a whole dimension", node)
    return found


def ordered(found: Set[Axis], outer: Axes) -> Axes:
    """The axes in the order of `outer`, followed by those that are not in it."""
    return tuple(sorted(found, key=lambda axis: (outer.index(axis) if axis in outer else len(outer), axis.serial)))


def subtract(left: Index, right: Index) -> Index | None:
    """`left - right`, in whatever digits they are written; None if they have no common digits."""
    cut_at = _where_cut((left, right))
    if cut_at is None:
        return None
    negative = ((digit, -stride) for digit, stride in _atoms(right, cut_at))
    return combine(left.offset - right.offset, [*_atoms(left, cut_at), *negative])


def _atoms(index: Index, cut_at: Mapping[Axis, Sequence[Size]]) -> list[Term]:
    """The terms of an index with its digits split wherever their axis is cut."""
    return [term for digit, stride in index.terms for term in _split_at(digit, stride, cut_at.get(digit.axis, ()))]


def _split_at(digit: Digit, stride: Size, cut_at: Sequence[Size]) -> list[Term]:
    for cut in cut_at:
        inner = ratio(cut, digit.below)
        if inner not in (None, 1) and ratio(digit.size, inner) not in (None, 1):
            upper, lower = digit.split(inner)
            return [(lower, stride), *_split_at(upper, plain(stride * inner), cut_at)]
    return [(digit, stride)]


# --- one axis for another ----------------------------------------------------------------------------------------


def speaks_of(index: Index, axes: Container[Axis]) -> bool:
    """Whether some digit of the index belongs to one of these axes."""
    for digit, _ in index.terms:  # noqa: SIM110  # called thousands of times: `any` would cost twice as much
        if digit.axis in axes:
            return True
    return False


def substitute(index: Index, replacements: Mapping[Axis, Index]) -> Index | None:
    """`index` with some axes replaced by other indices; None if a digit of one of those is not an index."""
    if not speaks_of(index, replacements):
        return index
    offset = index.offset
    terms: list[Term] = []
    for digit, stride in index.terms:
        target = replacements.get(digit.axis)
        if target is None:
            terms.append((digit, stride))
            continue
        part = digit_of(target, digit)
        if part is None:
            return None
        offset = offset + stride * part.offset
        terms += [(inner, inner_stride * stride) for inner, inner_stride in part.terms]
    return combine(offset, terms)


def digit_of(index: Index, digit: Digit) -> Index | None:
    """`index // below % size`, where `index` counts like the digit's axis."""
    if digit.is_whole:
        return index
    above = ratio(digit.axis.size, digit.below * digit.size)
    if above is None:
        return None
    parts = reshape((index,), (digit.axis.size,), (above, digit.size, digit.below))
    return None if parts is None else parts[1]


def without_digits(indices: Iterable[Index]) -> dict[Axis, Index] | None:
    """Replace every axis with digits by a composite of new axes, so that no index reads a digit of one.

    None if two indices cut an axis at two positions and neither divides the other."""
    cut_at = _where_cut(indices)
    return None if cut_at is None else {axis: _parted(axis, found) for axis, found in cut_at.items()}


def leaves(dim: Axes, parted: Mapping[Axis, Index]) -> Axes:
    """The axes that a dimension runs over where some axes were replaced by composites of new ones."""
    return tuple(leaf for axis in dim for leaf in (axes_of(parted[axis]) or () if axis in parted else (axis,)))


def _parted(axis: Axis, cut_at: Sequence[Size]) -> Index:
    sizes = [ratio(upper, lower) for lower, upper in itertools.pairwise([1, *cut_at, axis.size])]
    return composite([Axis(size) for size in reversed(sizes)])


def _where_cut(indices: Iterable[Index]) -> dict[Axis, list[Size]] | None:
    """The cuts of each axis by the digits that are read, lowest first; None if one cut does not divide the next."""
    cut_at: dict[Axis, list[Size]] = {}
    for index in indices:
        for digit, _ in index.terms:
            if digit.is_whole:
                continue
            found = cut_at.setdefault(digit.axis, [])
            for cut in (digit.below, plain(digit.below * digit.size)):
                if cut not in (1, digit.axis.size, *found):
                    found.append(cut)
    ordered = {axis: _multiples_last(found) for axis, found in cut_at.items() if found}
    for axis, found in ordered.items():
        if any(ratio(upper, lower) is None for lower, upper in itertools.pairwise([1, *found, axis.size])):
            return None
    return ordered


def _multiples_last(cut_at: list[Size]) -> list[Size]:
    return sorted(cut_at, key=lambda cut: sum(ratio(cut, other) is not None for other in cut_at))


# --- the one hard view: reshape ----------------------------------------------------------------------------------


def reshape(indices: Sequence[Index], sizes: Sequence[Size], new_sizes: Sequence[Size]) -> tuple[Index, ...] | None:
    """Where `reshape(x, sizes)` read at `indices` reads `x` of `new_sizes`; None if that is not an affine index."""
    if [size for size in sizes if size != 1] == [size for size in new_sizes if size != 1]:
        kept = iter([index for index, size in zip(indices, sizes, strict=True) if size != 1])
        return tuple(ZERO if size == 1 else next(kept) for size in new_sizes)
    offset: Size = 0
    pending: list[Term] = []
    for index, stride in zip(indices, strides_of(sizes), strict=True):
        offset = plain(offset + index.offset * stride)
        pending += [(digit, plain(step * stride)) for digit, step in index.terms]
    pending = list(combine(0, pending).terms)

    strides = strides_of(new_sizes)
    terms: list[list[Term]] = [[] for _ in new_sizes]
    while pending:
        digit, stride = pending.pop()
        found = _dimension_of(digit, stride, new_sizes, strides)
        if found is None:
            return None
        dim, inner = found
        if inner is None:
            terms[dim].append((digit, ratio(stride, strides[dim])))
            continue
        upper, lower = digit.split(inner)
        pending += [(upper, plain(stride * inner)), (lower, stride)]

    offsets = _digits(offset, strides, new_sizes)
    if offsets is None:
        return None
    out = tuple(combine(start, dim_terms) for start, dim_terms in zip(offsets, terms, strict=True))
    return out if all(_within(index, size) for index, size in zip(out, new_sizes, strict=True)) else None


def _dimension_of(
    digit: Digit, stride: Size, sizes: Sequence[Size], strides: Sequence[Size]
) -> tuple[int, Size | None] | None:
    """The dimension that a term belongs to, and the inner size at which its digit must be split first, if it must."""
    for dim in range(len(sizes) - 1, -1, -1):
        step = None if sizes[dim] == 1 else ratio(stride, strides[dim])
        if step is None:
            continue
        above = strides[dim] * sizes[dim]  # the first stride that belongs to a slower dimension
        is_outermost = all(size == 1 for size in sizes[:dim])
        if ratio(stride, above) is not None and not is_outermost:
            continue
        if at_most(plain(1 + step * (digit.size - 1)), sizes[dim]) or is_outermost:
            return dim, None
        inner = ratio(above, stride)
        if inner is None or ratio(digit.size, inner) is None:
            return None
        return dim, inner
    return None


def _digits(offset: Size, strides: Sequence[Size], sizes: Sequence[Size]) -> list[Size] | None:
    """`offset` in the mixed radix of the shape. If there is an element, no size is less than one."""
    digits: list[Size] = []
    least = strides_of([size if isinstance(size, int) else 1 for size in sizes])
    for stride, known in zip(strides, least, strict=True):
        if offset == 0:
            digits.append(0)
        elif isinstance(offset, int) and isinstance(stride, int):
            digits.append(offset // stride)
            offset %= stride
        elif (times := ratio(offset, stride)) is not None:
            digits.append(times)
            offset = 0
        else:
            times, offset = multiples(offset, stride)
            if not (at_most(0, offset) and (at_most(offset + 1, known) or at_most(offset + 1, stride))):
                return None
            digits.append(times)
    return digits


def _within(index: Index, size: Size) -> bool:
    """Whether the index provably stays below `size`, so that nothing is carried into the next dimension."""
    return at_most(index.offset + extent(index), size)
