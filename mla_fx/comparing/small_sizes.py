"""A small number for each size in a part of a graph, such that its calls still fit together.

Equal sizes get equal numbers, so what had to be as long as something else still is. What calls ask of sizes beyond
being equal are equations: a view makes products of them, a slice, a cat and a split make sums. The equations determine
some of the numbers; the others are chosen small, growing with the sizes, and all different. A size that is as large as
a tensor has whole numbers still is: they may all be different places in it. Sizes in equations that contradict each
other stay as they are.

Some whole numbers of a call are no sizes. What multiplies a floating value is a number, also if a size is as large.
What is added to positions, or divides them, is a size: of a page, or of a cache."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.schemas import named_arguments
from mla_fx.graph.torch_private import OpOverload, hint_of, tree_leaves
from mla_fx.rewriting.draft import Draft, fake_of

SMALL = 4  # the largest size that always stays as it is
MORE = 3  # than the places; whole numbers are drawn from a few more
aten = torch.ops.aten

Shape = tuple[int, ...]
Value = Node | Draft

DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
KERNEL = frozenset({"tile_size"})  # a number that an operator's kernel knows
NO_SIZES = DIMENSIONS | KERNEL
VALUES = ("Tensor", "number", "Optional[Tensor]", "Optional[number]")  # types in schemas
PLACES = (torch.int64, torch.int32, torch.bool)
UNKNOWN = 8  # for a symbol that is the size of nothing


def small_sizes(
    sizes: Iterable[int],
    equations: Iterable[Equation],
    places: Collection[Shape] = (),
    keep: Collection[int] = (),
    first: int = SMALL + 1,
    shifts: Collection[int] = (),
) -> Mapping[int, int]:
    """A number for each size, the smallest chosen one being `first`. `places` are the shapes of whole numbers. Sizes in
    `keep` stay as they are. What whole numbers are shifted by is a size that a cache has room for."""
    sizes, equations = {*sizes, *shifts}, [*equations, *of_cuts(*shifts)]
    asked = {each for each in equations if each.whole not in each.parts}
    numbers = {*sizes, *(size for each in asked for size in (each.whole, *each.parts))}
    kept = {size for size in numbers if size <= SMALL or size in keep}
    while True:
        small = _assigned(numbers, asked, places, kept, first, shifts)
        broken = [each for each in asked if small[each.whole] != each.combine(small[part] for part in each.parts)]
        more = {size for each in broken for size in (each.whole, *each.parts)} - kept
        if not more:
            return small
        kept |= more


def _assigned(
    numbers: set[int],
    equations: Iterable[Equation],
    places: Iterable[Shape],
    kept: set[int],
    first: int,
    shifts: Iterable[int],
) -> dict[int, int]:
    """Sizes are assigned in order, so parts come before their whole."""
    products_first = sorted(equations, key=lambda each: (each.combine is sum, each.parts))
    determined = {each.whole: each for each in reversed(products_first)}
    small, last = {size: size for size in kept}, first - 1
    for size in sorted(numbers - kept):
        equation = determined.get(size)
        if equation is not None:
            small[size] = equation.combine(small[part] for part in equation.parts)
            continue
        fitting = (shape for shape in places if math.prod(shape) <= size and small.keys() >= {*shape})
        more = MORE + sum(small[shift] for shift in shifts if shift in small)
        last = max([last + 1, *(math.prod(small[part] for part in shape) + more for shape in fitting)])
        while last in kept:
            last += 1
        small[size] = last
    return small


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


def numbers_of(call: Value) -> Iterator[float]:
    """The numbers of the program that a call takes."""
    kept = never_sizes(call) - DIMENSIONS
    for name, argument in named_arguments(call):
        for leaf in tree_leaves(argument):
            if type(leaf) is float or (type(leaf) is int and name in kept):
                yield leaf


def never_sizes(call: Value) -> frozenset[str]:
    """The arguments of a call in which a whole number is no size."""
    if not isinstance(call.target, OpOverload):
        return frozenset()
    has_numbers = int in {*map(type, call.args), *map(type, call.kwargs.values())}
    return NO_SIZES | _values(call.target) if has_numbers and _computes_values(call) else NO_SIZES


@functools.cache
def _values(target: OpOverload) -> frozenset[str]:
    """The arguments that are values. Those of arange count its elements."""
    if target._opname == "arange":
        return frozenset()
    return frozenset(each.name for each in target._schema.arguments if str(each.real_type) in VALUES)


def _computes_values(call: Value) -> bool:
    """Whether a call computes with other than places: its operands, or its result if it has none."""
    operands, results = tree_leaves(fake_of([call.args, [*call.kwargs.values()]])), tree_leaves(fake_of(call))
    tensors = _tensors(operands) or _tensors(results)
    return any(tensor.dtype not in PLACES for tensor in tensors)


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Numbers:
    """A number for each symbol: the one that the compiler has seen. With `apart`, it is multiplied by a prime: then no
    symbol has the number of another size, and each keeps its divisors."""

    def __init__(self, values: Iterable[Any], *, apart: bool) -> None:
        primes = (number for number in itertools.count(11, 2) if sympy.isprime(number))
        sizes = list(_symbolic(values))
        seen = {size.node.expr: hint_of(size) for size in sizes}
        self.are_plain = not sizes  # a symbol that became a number is none of the symbols, and still no int
        self.symbols: dict[sympy.Symbol, int] = {}
        for symbol in dict.fromkeys(symbol for size in sizes for symbol in size.node.expr.free_symbols):
            number = seen.get(symbol, UNKNOWN)
            self.symbols[symbol] = number * next(primes) if apart else number
        self.found: dict[Any, int] = {}

    def of(self, value: Any) -> Any:
        """A tensor as its shape, and a size as a number; also in lists."""
        if isinstance(value, Tensor):
            return tuple(value.shape) if self.are_plain else tuple(map(self.of, value.shape))
        if isinstance(value, (list, tuple)):
            return [self.of(part) for part in value]
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression not in self.found:
            self.found[expression] = int(expression.xreplace(self.symbols))
        return self.found[expression]


def _symbolic(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    for value in values:
        if isinstance(value, torch.SymInt):
            yield value
        elif isinstance(value, Tensor):
            sizes: Iterable[Any] = value.shape
            yield from (size for size in sizes if isinstance(size, torch.SymInt))
        elif isinstance(value, (list, tuple)):
            yield from _symbolic(value)
