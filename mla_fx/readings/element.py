"""One element of a value, followed through views to the operation that computes it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.walk import nearest_first
from mla_fx.readings.concatenation import rejoined

from .axes import Axis, Index, speaks_of, substitute
from .calls import CASTS, args_of, operands_of, options_of
from .constant import constant
from .views import Place, broadcast, fresh_index, move

aten = torch.ops.aten

Step = tuple[Place, float]


@dataclass(frozen=True)
class Element:
    """`factor * scales * origin[index]`, where `origin` is the operation that computes it.

    There are only two ways to the operation, so that no factor is lost: `node`, which refuses an element with a factor,
    and `apart()`, which returns the factor, too. (`origin` is for messages, and for asking which operation it is.)

    `top` is the same value before casts and constant factors: `top_factor * top[0][top[1]]`. A rewrite reads it, so
    that no rounding of the user's is lost. `roundings` are the dtypes that the value was rounded to in between, the
    last one first. `coarsest` is the least precise dtype that it had since it was last multiplied. `peak` is the
    largest factor that it had on the way; factors may cancel later. `scales` belong to the codes of a quantised value.
    Two elements are equal if the same operation computes them, they were rounded alike, and their scales are equal."""

    origin: Node
    index: tuple[Index, ...]
    factor: float = 1.0
    roundings: tuple[torch.dtype, ...] = ()
    top: Place | None = field(default=None, compare=False, repr=False)
    top_factor: float = field(default=1.0, compare=False, repr=False)
    coarsest: torch.dtype | None = field(default=None, compare=False, repr=False)
    peak: float = field(default=1.0, compare=False, repr=False)
    scales: Scales | None = None

    @property
    def node(self) -> Node:
        """The operation that computes the element. Raises NoMatch if its result is multiplied by a number or scales."""
        if self.factor != 1.0:
            raise NoMatch(f"{name_of(self.origin)} is multiplied by a number, {self.factor:.6g}", self.origin)
        if self.scales is not None:
            raise NoMatch(f"{name_of(self.origin)} is multiplied by the scales of a quantised value", self.origin)
        return self.origin

    def apart(self) -> tuple[float, Element]:
        """The constant factor, and the element without it."""
        if self.factor == 1.0:
            return 1.0, self
        return self.factor, replace(self, factor=1.0, top=(self.origin, self.index), top_factor=1.0)

    def times(self, number: float) -> Element:
        if number == 1.0:
            return self
        return replace(self, factor=self.factor * number, top_factor=self.top_factor * number)

    @property
    def axes(self) -> frozenset[Axis]:
        return frozenset(axis for part in self.index for axis in part.axes)

    @property
    def seen(self) -> Place:
        """Where the program reads the value, with only views followed."""
        return (self.origin, self.index) if self.top is None else self.top

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the program reads this value, or the product of its codes and scales."""
        return _dtype(*self.seen) if self.scales is None else self.scales.dtype

    @property
    def as_operand(self) -> tuple[Node, tuple[Index, ...], float]:
        """Where a rewrite reads the value: before casts, unless the operand of a cast had been repeated first."""
        node, index = self.seen
        if index != self.index and {axis for part in index for axis in part.axes} != self.axes:
            return self.origin, self.index, self.factor
        return node, index, self.factor if self.top is None else self.top_factor

    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Whether storing the value in `dtype` rounds it no further than the program does."""
        if self.scales is not None:
            return not is_coarser(dtype, self.scales.dtype)
        node, index, _ = self.as_operand
        return not is_coarser(dtype, _dtype(node, index)) or not is_coarser(dtype, self.coarsest or self.dtype)

    @property
    def stored(self) -> Element:
        """The element before casts that do nothing but widen it, for operators that widen it themselves."""
        is_itself = self.factor == 1.0 and self.scales is None and not self.roundings
        is_widened = is_itself and is_coarser(_dtype(self.origin, self.index), self.dtype)
        return replace(self, top=None) if is_widened else self

    def at(self, replacements: Mapping[Axis, Index]) -> Element:
        """The element at another index, which may lead through further views. Raises NoMatch if that is not
        possible."""
        node, index = self.seen
        moved = _substituted(node, index, replacements)
        found = resolve(node, moved, self.factor if self.top is None else self.top_factor)
        return found if self.scales is None else replace(found, scales=self.scales.at(replacements))

    def renamed(self, replacements: Mapping[Axis, Index]) -> Element:
        """The element with other names for its axes; it is not followed any further."""
        if not any(speaks_of(part, replacements) for part in (*self.index, *self.seen[1])):
            return self
        index, top = _substituted(self.origin, self.index, replacements), self.top
        if top is not None:
            top = (top[0], index if top[1] == self.index else _substituted(*top, replacements))
        scales = None if self.scales is None else self.scales.renamed(replacements)
        return replace(self, index=index, top=top, scales=scales)

    @property
    def indices(self) -> Iterator[Index]:
        """Where the value and its scales are read, with and without casts."""
        yield from (*self.index, *self.seen[1])
        yield from () if self.scales is None else (part for scale in self.scales.by for part in scale.indices)


@dataclass(frozen=True)
class Scales:
    """The tensors that multiply the codes of a quantised value. Each is the same along some of the value's axes.

    The program may compute only products with the scaled value; `dtype` is the least precise that these have."""

    by: tuple[Element, ...]
    dtype: torch.dtype

    def at(self, replacements: Mapping[Axis, Index]) -> Scales:
        return replace(self, by=tuple(scale.at(replacements) for scale in self.by))

    def renamed(self, replacements: Mapping[Axis, Index]) -> Scales:
        return replace(self, by=tuple(scale.renamed(replacements) for scale in self.by))


def _substituted(node: Node, index: tuple[Index, ...], replacements: Mapping[Axis, Index]) -> tuple[Index, ...]:
    moved = [substitute(part, replacements) for part in index]
    if None in moved:
        raise NoMatch("a dimension is read across a boundary at which a view splits it", node)
    return tuple(part for part in moved if part is not None)


def _dtype(node: Node, index: tuple[Index, ...]) -> torch.dtype:
    value = node.meta["val"]
    is_part = len(index) > value.ndim  # the real or imaginary part of a complex value
    dtype = value.dtype.to_real() if is_part else value.dtype
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_coarser(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether rounding to `one` may change a value of dtype `other`."""
    if one == other or not (one.is_floating_point and other.is_floating_point):
        return False
    mine, others = torch.finfo(one), torch.finfo(other)
    return mine.eps > others.eps or mine.max < others.max or mine.smallest_normal > others.smallest_normal


def narrows(call: Node) -> bool:
    """Whether the result of a call has a coarser dtype than a tensor that it gets."""
    given = (source.meta["val"] for source in operands_of(call))
    dtype = call.meta["val"].dtype
    return any(is_coarser(dtype, value.dtype) for value in given if isinstance(value, torch.Tensor))


def resolve(node: Node, index: tuple[Index, ...], factor: float = 1.0) -> Element:
    """The element `factor * node[index]`, followed to the operation that computes it."""
    top: Place | None = None
    top_factor = factor
    peak = 1.0
    dtypes: list[torch.dtype] = []
    since_factor: int | None = None
    while True:
        place = move(node, index) or rejoined(node, index)
        if place is not None:
            node, index = place
            continue
        if top is None:
            top = (node, index)
        dtypes.append(_dtype(node, index))
        look_through = TRANSPARENT.get(node.target)
        step = None if look_through is None else look_through(node, index)
        if step is None:
            if len(dtypes) == 1:
                return Element(node, index, factor, (), top, top_factor, dtypes[0])
            coarsest = functools.reduce(_coarser, dtypes[:since_factor])
            return Element(node, index, factor, _roundings(dtypes), top, top_factor, coarsest, peak)
        (node, index), number = step
        factor *= number
        peak = max(1.0, peak * abs(number))
        since_factor = len(dtypes) if since_factor is None and abs(number) != 1.0 else since_factor


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if is_coarser(one, other) else other


def _roundings(dtypes: list[torch.dtype]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a value that may have changed it; it was computed in the first."""
    rounded: list[torch.dtype] = []
    finest = dtypes[-1]
    for dtype in reversed(dtypes):
        if is_coarser(dtype, finest):
            rounded.insert(0, dtype)
            finest = dtype
    return tuple(rounded)


def element_of(node: Node) -> Element:
    """A general element of `node`: one new axis for each dimension."""
    return resolve(node, fresh_index(node))


def operand(value: Any, index: tuple[Index, ...], factor: float = 1.0) -> Element:
    """The element of a pointwise operand that enters the result at `index`. Raises NoMatch for a number."""
    if not isinstance(value, Node):
        raise NoMatch(f"expected a tensor, found the number {value}")
    return resolve(value, broadcast(value, index), factor)


def operands(element: Element) -> list[Element]:
    """The elements of the tensors that an operation of two operands combines; numbers are left out."""
    values = (value for value in args_of(element.origin)[:2] if isinstance(value, Node))
    return [operand(value, element.index) for value in values if isinstance(value.meta["val"], torch.Tensor)]


def before_cast(element: Element) -> Element:
    """What an element was before it was cast, if it was; casts between floats are followed already."""
    node = element.origin
    return operand(args_of(node)[0], element.index) if node.target in CASTS else element


def _cast(node: Node, index: tuple[Index, ...]) -> Step | None:
    source = args_of(node)[0]
    return ((source, index), 1.0) if _both_real(node, source) else None


def _copied(node: Node, index: tuple[Index, ...]) -> Step | None:
    """Follow `copy` to another dtype."""
    source = args_of(node)[1]
    return ((source, broadcast(source, index)), 1.0) if _both_real(node, source) else None


def _both_real(node: Node, source: Node) -> bool:
    """Whether a cast is between floats. One to float8 quantises, which is more than a rounding."""
    kinds = node.meta["val"].dtype, source.meta["val"].dtype
    return kinds[0] == kinds[1] or (all(kind.is_floating_point for kind in kinds) and kinds[0].itemsize > 1)


def _negated(node: Node, index: tuple[Index, ...]) -> Step | None:
    return _scaled(node, args_of(node)[0], index, -1.0)


def _multiplied(node: Node, index: tuple[Index, ...]) -> Step | None:
    left, right = args_of(node)[:2]
    if (factor := constant(right)) is not None:
        return _scaled(node, left, index, factor)
    return _scaled(node, right, index, constant(left))


def _divided(node: Node, index: tuple[Index, ...]) -> Step | None:
    divisor = constant(args_of(node)[1])
    return _scaled(node, args_of(node)[0], index, 1.0 / divisor if divisor else None)


def _added(node: Node, index: tuple[Index, ...]) -> Step | None:
    is_nothing = len(args_of(node)) == 2 and not options_of(node) and constant(args_of(node)[1]) == 0
    return _scaled(node, args_of(node)[0], index, 1.0 if is_nothing else None)


def _scaled(node: Node, value: Any, index: tuple[Index, ...], factor: float | None) -> Step | None:
    """Follow a constant factor, if it can be divided out again and the dtype stays real or complex: integers round, and
    zero loses everything."""
    if not isinstance(value, Node) or factor is None or factor == 0 or not math.isfinite(factor):
        return None
    kinds = node.meta["val"].dtype, value.meta["val"].dtype
    is_kept = all(kind.is_floating_point for kind in kinds) or all(kind.is_complex for kind in kinds)
    return ((value, broadcast(value, index)), factor) if is_kept else None


# Casts between floating dtypes, and constant factors: each is followed to the operand and its factor.
TRANSPARENT: dict[Any, Callable[[Node, tuple[Index, ...]], Step | None]] = {
    **dict.fromkeys(CASTS, _cast),
    aten.copy.default: _copied,
    aten.neg.default: _negated,
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.div.Tensor: _divided,
    aten.div.Scalar: _divided,
    aten.add.Tensor: _added,
    aten.add.Scalar: _added,
}


def is_parameter(node: Node) -> bool:
    """Whether this is a graph input or attribute, which no operation of this graph computes."""
    return node.op in ("placeholder", "get_attr")


def has_8_bits(node: Node) -> bool:
    """Whether the numbers of a value have 8 bits."""
    dtype = getattr(node.meta.get("val"), "dtype", torch.bool)
    return dtype.itemsize == 1 and dtype is not torch.bool


def computed_from(value: Node, is_end: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """A value and all that it is computed from, nearest first, as far as ends. The value itself is none."""
    return nearest_first((value,), operands_of, lambda node: node is not value and is_end(node))


def computed_with(values: Iterable[Node], is_end: Callable[[Node], bool]) -> Iterator[Node]:
    """All that is computed from some values, nearest first, as far as ends."""
    return nearest_first(_users(values), lambda node: _users([node]), is_end)


def readers(value: Node, steps: Container[object]) -> Iterator[Node]:
    """The nearest calls that read a value, nearest first, directly or through steps."""
    users = computed_with([value], lambda user: user.target not in steps)
    return (user for user in users if user.target not in steps)


def first_reader(value: Node, wanted: Container[object], steps: Container[object]) -> Node | None:
    """The nearest of these readers that calls a wanted operator."""
    return next((user for user in readers(value, steps) if user.target in wanted), None)


def _users(values: Iterable[Node]) -> Iterator[Node]:
    return (user for value in values for user in value.users)


def computed_between(value: Node, stops: Set[Node]) -> Iterator[Node]:
    """The same as far as `stops`, which are left out, and so are constants."""

    def is_end(node: Node) -> bool:
        return node in stops or constant(node) is not None

    return iter(()) if is_end(value) else itertools.filterfalse(is_end, computed_from(value, is_end))
