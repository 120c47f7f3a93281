"""Index arithmetic over named axes: the offset and strides with which a value's dimension is read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

Size = Any  # int, or a sympy expression over the symbols of a dynamic shape

_serial = itertools.count()


class Axis:
    """One loop variable, from 0 up to `size`. Once split it stands for (outer, inner) in row-major order."""

    __slots__ = ("parts", "serial", "size")

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parts: tuple[Axis, Axis] | None = None
        self.serial = next(_serial)

    def split(self, outer: Size, inner: Size) -> None:
        self.parts = (Axis(outer), Axis(inner))

    def __repr__(self) -> str:
        return f"a{self.serial}:{self.size}"


@dataclass(frozen=True)
class Index:
    """`offset + sum(stride * axis)`: where one dimension is read. Terms are ordered, so equal indices compare equal."""

    offset: Size = 0
    terms: tuple[tuple[Axis, Size], ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for axis, _ in self.terms)

    def is_axis(self, axis: Axis) -> bool:
        """True if this is exactly `axis`, read from its start in steps of one."""
        return self.offset == 0 and self.terms == ((axis, 1),)


ZERO = Index()


def of_axis(axis: Axis, stride: Size = 1, offset: Size = 0) -> Index:
    return combine(offset, [(axis, stride)])


def fresh(size: Size) -> Index:
    """A new axis over a dimension of `size`; a dimension of one element needs none."""
    return ZERO if size == 1 else Index(0, ((Axis(size), 1),))


def combine(offset: Size, terms: Iterable[tuple[Axis, Size]]) -> Index:
    """An index from loose terms: split axes become their parts, equal axes are added up, axes of size 1 dropped."""
    total: dict[Axis, Size] = {}
    pending = list(terms)
    while pending:
        axis, stride = pending.pop()
        if axis.parts is not None:
            outer, inner = axis.parts
            pending += [(outer, stride * inner.size), (inner, stride)]
        elif axis.size != 1:
            total[axis] = plain(total.get(axis, 0) + stride)
    ordered = sorted(total.items(), key=lambda term: term[0].serial)
    return Index(offset, tuple((axis, stride) for axis, stride in ordered if stride != 0))


def settle(index: Index) -> Index:
    """`index` with axes that were split since it was built replaced by their parts."""
    if all(axis.parts is None for axis, _ in index.terms):
        return index
    return combine(index.offset, index.terms)


def shifted(index: Index, by: Size, step: int = 1) -> Index:
    """`by + step * index`: how a slice reads the dimension it slices."""
    return Index(plain(by + step * index.offset), tuple((axis, step * stride) for axis, stride in index.terms))


def substitute(index: Index, replacements: dict[Axis, Index]) -> Index:
    """`index` with some axes replaced by other indices."""
    if not any(axis in replacements for axis in index.axes):
        return index
    offset, terms = index.offset, []
    for axis, stride in index.terms:
        target = replacements.get(axis)
        if target is None:
            terms.append((axis, stride))
            continue
        offset = plain(offset + stride * target.offset)
        terms += [(inner, stride * inner_stride) for inner, inner_stride in target.terms]
    return combine(offset, terms)


def composite(axes: Sequence[Axis]) -> Index:
    """Several axes read as one dimension, the first varying slowest."""
    terms: list[tuple[Axis, Size]] = []
    stride: Size = 1
    for axis in reversed(axes):
        terms.append((axis, stride))
        stride = stride * axis.size
    return combine(0, terms)


def extent(index: Index) -> Size:
    """One more than the furthest position the index reaches past its offset."""
    return plain(1 + sum((stride * (axis.size - 1) for axis, stride in index.terms), 0))


def leaves(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes in order, each split one replaced by its parts, axes of size 1 left out."""
    out: list[Axis] = []
    for axis in axes:
        if axis.parts is not None:
            out += leaves(axis.parts)
        elif axis.size != 1:
            out.append(axis)
    return tuple(out)


# --- sizes -----------------------------------------------------------------------------------------------------------


def size_of(value: Any) -> Size:
    """A size as an int or a sympy expression; asking never adds a guard."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if isinstance(expression, (int, sympy.Integer)) else expression


def plain(size: Size) -> Size:
    """An int where the expression is one: sympy keeps its own integers."""
    return int(size) if isinstance(size, sympy.Integer) else size


def product(sizes: Iterable[Size]) -> Size:
    return plain(functools.reduce(lambda left, right: left * right, sizes, 1))


def ratio(numerator: Size, denominator: Size) -> Size | None:
    """`numerator / denominator` where the division leaves no rest for any value of the symbols, else None."""
    if isinstance(numerator, int) and isinstance(denominator, int):
        return numerator // denominator if denominator and numerator % denominator == 0 else None
    return _symbolic_ratio(sympy.sympify(numerator), sympy.sympify(denominator))


@functools.lru_cache(maxsize=4096)
def _symbolic_ratio(numerator: sympy.Expr, denominator: sympy.Expr) -> Size | None:
    quotient = sympy.cancel(numerator / denominator)
    if sympy.fraction(sympy.together(quotient))[1] != 1:
        return None
    return plain(quotient)


def at_most(small: Size, large: Size) -> bool:
    """Provably `small <= large`. Symbols are positive, so dividing evenly proves it for them."""
    if isinstance(small, int) and isinstance(large, int):
        return small <= large
    if isinstance(large, int) and large == 0:
        return False
    return bool(small == large) or ratio(large, small) is not None


# --- the one hard view: reshape --------------------------------------------------------------------------------------


def strides_of(sizes: Sequence[Size]) -> list[Size]:
    """Row-major strides of a dense tensor."""
    strides: list[Size] = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return strides


def reshape(indices: Sequence[Index], sizes: Sequence[Size], new_sizes: Sequence[Size]) -> tuple[Index, ...] | None:
    """Where `reshape(x, sizes)` read at `indices` reads `x` of `new_sizes`; None if that is no affine index.

    An axis that straddles a boundary of the new shape is split there, for everyone who uses it."""
    offset: Size = 0
    pending: list[tuple[Axis, Size]] = []
    for index, stride in zip(indices, strides_of(sizes), strict=True):
        offset = plain(offset + index.offset * stride)
        pending += [(axis, step * stride) for axis, step in index.terms]

    strides = strides_of(new_sizes)
    terms: list[list[tuple[Axis, Size]]] = [[] for _ in new_sizes]
    while pending:
        axis, stride = pending.pop()
        if axis.parts is not None:
            outer, inner = axis.parts
            pending += [(outer, stride * inner.size), (inner, stride)]
            continue
        if axis.size == 1:
            continue
        place = _place(axis, stride, new_sizes, strides)
        if place is None:
            return None
        dim, inner_size = place
        if inner_size is None:
            terms[dim].append((axis, ratio(stride, strides[dim])))
            continue
        axis.split(ratio(axis.size, inner_size), inner_size)
        pending.append((axis, stride))

    offsets = _digits(offset, strides, new_sizes)
    if offsets is None:
        return None
    out = tuple(combine(start, dim_terms) for start, dim_terms in zip(offsets, terms, strict=True))
    within = all(_within(index, size) for index, size in zip(out, new_sizes, strict=True))
    return out if within else None


def _place(axis: Axis, stride: Size, sizes: Sequence[Size], strides: Sequence[Size]) -> tuple[int, Size | None] | None:
    """The dimension that a term belongs to, and the inner size at which its axis must be split first, if it must."""
    for dim in range(len(sizes) - 1, -1, -1):
        if sizes[dim] == 1 or ratio(stride, strides[dim]) is None:
            continue
        above = strides[dim] * sizes[dim]  # the first stride that belongs to a slower dimension
        if _is_whole(stride, above):
            continue
        if at_most(stride * axis.size, above) or _outermost(dim, sizes):
            return dim, None
        inner = ratio(above, stride)
        if inner is None or ratio(axis.size, inner) is None:
            return None
        return dim, inner
    return None


def _is_whole(stride: Size, above: Size) -> bool:
    return ratio(stride, above) is not None


def _outermost(dim: int, sizes: Sequence[Size]) -> bool:
    return all(size == 1 for size in sizes[:dim])


def _digits(offset: Size, strides: Sequence[Size], sizes: Sequence[Size]) -> list[Size] | None:
    """`offset` written in the mixed radix of the shape."""
    digits: list[Size] = []
    for dim, stride in enumerate(strides):
        if offset == 0:
            digits.append(0)
        elif isinstance(offset, int) and isinstance(stride, int):
            digits.append(offset // stride)
            offset %= stride
        elif (whole := ratio(offset, stride)) is not None:
            digits.append(whole)
            offset = 0
        elif isinstance(offset, int) and 0 < offset < _least(stride) and dim < len(strides) - 1:
            digits.append(0)
        else:
            return None
    return digits


def _least(stride: Size) -> int:
    """The least value of a symbolic stride: sizes that are symbols are at least two, zero and one being special."""
    smallest = sympy.sympify(stride).subs(dict.fromkeys(sympy.sympify(stride).free_symbols, 2))
    return int(smallest) if smallest.is_Integer else 0


def _within(index: Index, size: Size) -> bool:
    last = index.offset + extent(index)
    if isinstance(last, int) and isinstance(size, int):
        return last <= size
    return True  # symbolic terms were placed by exact division, so they carry nothing over
