"""What calls ask of sizes beyond being equal: a view makes products of them, a slice, a cat and a split make sums.

Tensors are given as their shapes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

Shape = tuple[int, ...]


class Equation(NamedTuple):
    """`whole` is the sum or the product of `parts`."""

    combine: Callable[[Iterable[int]], int]
    whole: int
    parts: Shape


def of_views(old: Shape, new: Shape) -> Iterator[Equation]:
    """Adjacent dimensions that together have as many elements on both sides have as many in every size."""
    left, right = ([size for size in sizes if size != 1] for sizes in (old, new))
    if left == right or math.prod(left) != math.prod(right) or 0 in left:
        return  # numbers in place of symbols need not fit
    while left and right:
        one, other = [left.pop()], [right.pop()]
        while math.prod(one) != math.prod(other):
            smaller, rest = (one, left) if math.prod(one) < math.prod(other) else (other, right)
            smaller.append(rest.pop())
        yield from (Equation(math.prod, math.prod(one), tuple(sorted(parts))) for parts in (one, other))


def of_cuts(*places: int) -> Iterator[Equation]:
    """A dimension that is cut at these places, its end among them. What lies between any two of them is a size."""
    cuts = sorted({0, *places})
    pieces = [end - start for start, end in itertools.pairwise(cuts)]
    for first, last in itertools.combinations(range(len(cuts)), 2):
        yield Equation(sum, cuts[last] - cuts[first], tuple(sorted(pieces[first:last])))


def of_pieces(sizes: Iterable[int]) -> Iterator[Equation]:
    return of_cuts(*itertools.accumulate(sizes))


def of_bytes(old: Shape, new: Shape, width: float) -> Iterator[Equation]:
    """A view of the same bytes in elements of another width: there are so many for each of the old ones."""
    if old and width > 1:
        yield times(round(width), new[-1], old[-1])
    elif old and width < 1:
        yield times(round(1 / width), old[-1], new[-1])


def times(number: int, whole: int, part: int) -> Equation:
    return Equation(_times(number), whole, (part,))


@functools.cache
def _times(number: int) -> Callable[[Iterable[int]], int]:
    return lambda parts: number * math.prod(parts)


def _product(*parts: int) -> Equation:
    return Equation(math.prod, math.prod(parts), tuple(sorted(parts)))


def _view(result: Shape, value: Shape, *_: Any) -> Iterator[Equation]:
    return of_views(value, result)


def _slice(
    _: Any, value: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Iterator[Equation]:
    if not -len(value) <= dim < len(value):
        return  # a slice_scatter that raises when it runs
    size = value[dim]
    first, stop, _ = slice(start, end).indices(size)
    if step == 1:
        yield from of_cuts(first, stop, size)
    elif size % step == 0:
        yield _product(size // step, step)


def _slice_scatter(result: Shape, value: Shape, _: Any, *where: Any) -> Iterator[Equation]:
    return _slice(result, value, *where)


def _select(_: Any, value: Shape, dim: int, index: int) -> Iterator[Equation]:
    size = value[dim]
    return of_cuts(index % size, index % size + 1, size)


def _cat(_: Any, values: Sequence[Shape], dim: int = 0) -> Iterator[Equation]:
    return of_pieces(value[dim] for value in values if len(value) > 1 or value != (0,))


def _split(result: Sequence[Shape], _: Any, __: Any, dim: int = 0) -> Iterator[Equation]:
    pieces = [piece[dim] for piece in result]
    yield from of_pieces(pieces)
    if len(set(pieces)) == 1:
        yield _product(len(pieces), pieces[0])


def _pad(_: Any, value: Shape, pads: Sequence[int], *__: Any) -> Iterator[Equation]:
    for before, after, size in zip(pads[::2], pads[1::2], reversed(value), strict=False):
        if before >= 0 and after >= 0:
            yield from of_pieces((before, size, after))


def _repeat(result: Shape, _: Any, times: Sequence[int]) -> Iterator[Equation]:
    return (_product(count, whole // count) for whole, count in zip(result, times, strict=True) if count)


def _arange(_: Any, start: Any, end: Any, step: int = 1) -> Iterator[Equation]:
    is_counted = isinstance(start, int) and isinstance(end, int) and start >= 0
    return of_cuts(start, end) if is_counted else iter(())


def _compared(result: Shape, _: Any, number: Any) -> Iterator[Equation]:
    """Positions may be compared with a number: as many lie on either side of it."""
    if isinstance(number, int):
        for size in result:
            if 0 < number < size:
                yield from of_cuts(number, size)


# Of a call: functions of its result and its arguments.
EQUATIONS: dict[Any, Callable[..., Iterator[Equation]]] = {
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.constant_pad_nd.default: _pad,
    aten.repeat.default: _repeat,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    **{getattr(aten, name).Scalar: _compared for name in ("lt", "le", "gt", "ge", "eq", "ne")},
}
