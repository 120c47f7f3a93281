"""What a program rounds to codes, as a function of a value and of the row that it is in.

No spelling is matched: the arithmetic between a value and its codes, and between its row and their scale, is evaluated
on rows that are drawn at random. In float64 that says what the arithmetic is; in the program's own dtypes, whether it
gives the same bits as another. A maximum is attained at one element, so short rows reach all that long ones do."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.arithmetic import GUARDS, POINTWISE, TESTS, Arithmetic
from mla_fx.readings.axes import Axis, Index
from mla_fx.readings.calls import CASTS, args_of, argument
from mla_fx.readings.constant import constant
from mla_fx.readings.contraction import reduced
from mla_fx.readings.element import TRANSPARENT, Element, computed_from, element_of, is_parameter, operand, resolve
from mla_fx.readings.same_value import equal_calls, read_along
from mla_fx.readings.views import MOVERS, SPLITS

aten = torch.ops.aten

POINTS, LENGTH = 1024, 10  # of drawn rows
MOST_EXTREMES = LENGTH - 2  # so that each, and the largest magnitude, may be at an element of its own
ARITHMETIC = POINTWISE | GUARDS | TESTS | TRANSPARENT.keys() | {aten.round.default, aten.trunc.default}
WALKED = ARITHMETIC | {*MOVERS, *SPLITS, aten.cat.default, operator.getitem}
OTHER_VALUES = "the codes of tokens are divided by the largest of other values"

Reduce = Callable[[Tensor], Tensor]


def largest(row: Tensor) -> Tensor:
    return row.abs().amax(0)


LEAST, MOST = functools.partial(torch.amin, dim=0), functools.partial(torch.amax, dim=0)
EXTREMES: dict[object, tuple[Reduce, ...]] = {
    aten.amin.default: (LEAST,),
    aten.amax.default: (MOST,),
    aten.linalg_vector_norm.default: (largest,),
    aten.min.dim: (LEAST,),
    aten.max.dim: (MOST,),
    aten.aminmax.default: (LEAST, MOST),
}
"""How calls compute what they return of a row, but for the places of extremes."""


@dataclass(frozen=True)
class Draws:
    """Values [P] beside rows [LENGTH, P], and numbers [P] for a graph input."""

    value: Tensor
    row: Tensor
    given: Tensor

    @classmethod
    def one(cls, value: float, largest: float, given: float) -> Draws:
        row = torch.full((LENGTH, 1), largest, dtype=torch.float64) * (-1) ** torch.arange(LENGTH).unsqueeze(-1)
        return cls(row.new_tensor([value]), row, row.new_tensor([given]))

    @classmethod
    @functools.lru_cache(maxsize=4)
    def many(cls, low: float, high: float, most: float) -> Draws:
        """Rows whose largest magnitudes are between two powers of ten, some of one sign, and values up to 10^most times
        these, some equal to them."""
        draw = torch.Generator().manual_seed(0)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, POINTS, generator=draw, dtype=torch.float64)

        row, kind, sizes = 2 * uniform(LENGTH) - 1, torch.arange(POINTS) % 4, 10 ** (low + (high - low) * uniform())
        row = torch.where(kind == 0, row.abs(), torch.where(kind == 1, -row.abs(), row))
        shares = torch.where(uniform() < 0.5, (1.1 * uniform()).clamp(max=1), 10 ** (most - (most + 3) * uniform()))
        signs = (uniform(2) - 0.5).sign()
        return cls(shares * sizes * signs[0], row / largest(row) * sizes, (uniform() + 0.25) * signs[1])

    def to(self, dtype: torch.dtype) -> Draws:
        """Cast values and rows to a dtype, and make the graph input positive."""
        return Draws(self.value.to(dtype), self.row.to(dtype), self.given.abs().to(dtype))


@dataclass(kw_only=True)
class CodeArithmetic(Arithmetic):
    """Arithmetic on an element of `source`, on extremes of its row, and on a graph input."""

    source: Node
    rounds: bool = False
    over: dict[Axis, tuple[Index, ...]] = field(default_factory=dict)
    """The indices of a row, by the axes of each."""

    values: dict[int, Element] = field(default_factory=dict)
    rows: dict[int, tuple[Element, tuple[Index, ...]]] = field(default_factory=dict)
    """What is read of the source outside of rows, and in rows, by the places."""

    def read(self, element: Element) -> int:
        """The place of an element's value. Its casts and factors are steps."""
        node, index = element.seen
        if (node, index) not in self.places:
            self.places[node, index] = self._computed(Element(node, index))
        place, factor = self.places[node, index], element.factor if element.top is None else element.top_factor
        return place if factor == 1.0 else self._add(functools.partial(operator.mul, factor), [place])

    def product(self, elements: tuple[Element, ...]) -> int:
        return functools.reduce(lambda one, other: self._add(torch.mul, [one, other]), map(self.read, elements))

    def row(self, because: str) -> tuple[Element, tuple[Index, ...]]:
        """The value, and its indices along the row. Raises NoMatch if rows of others are read, or other values."""
        values = [*self.values.values()]
        found = {read_along(values[0], *row) for row in self.rows.values()} if len(values) == 1 else set()
        over = found.pop() if len(found) == 1 else None
        if over is None:
            raise NoMatch(because, self.source)
        return values[0], over

    def drawn(self, *, guarded: bool) -> Draws:
        """Points in the dtype of the source, of all sizes that it holds with room for factors, or above all guards."""
        dtype = self.source.meta["val"].dtype
        most = 4.0 if dtype == torch.float16 else 30.0
        return Draws.many(2.0 if guarded else -most, most, 0.0).to(dtype)

    def at(self, draws: Draws, *places: int, rounds: bool = False) -> list[Tensor]:
        """The values at some places. Casts between floats round if the program's own dtypes are asked for."""
        self.rounds = rounds
        given = dict.fromkeys(self.values, draws.value) | dict.fromkeys(self.rows, draws.row)
        found = self.computed(given | dict.fromkeys(self.leaves, draws.given))
        return [found[place] for place in places]

    def check_reached(self, draws: Draws) -> None:
        """Raises NoMatch if a step has a case that no point reaches. A multiple of the largest value has one sign."""
        for call, found in zip(self.switches.values(), self.at(draws, *self.switches), strict=True):
            share = found / largest(draws.row)
            if not (share.min() < 0 < share.max() or are_close(share, share.flatten()[0])):
                raise NoMatch(f"{name_of(call)} has a case that no row provably reaches", call)

    def _computed(self, plain: Element) -> int:
        node = plain.origin
        if equal_calls(node, self.source):
            return self._of_source(replace(plain, origin=self.source))
        if constant(node) is not None:
            return super()._computed(plain)
        if (extreme := _extreme(node)) is not None:
            return self._extreme(plain, *extreme)
        if node.target in CASTS and plain.dtype is not torch.bool:
            return self._held(node, self.read(operand(args_of(node)[0], plain.index)))
        found = self._pointwise(plain) if node.target in ARITHMETIC else None
        return self._leaf(plain) if found is None else self._held(node, found)

    def _held(self, node: Node, place: int) -> int:
        """Numbers as a dtype holds them; integers that it does not hold are NaN, and may wrap."""
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            return place
        if not dtype.is_floating_point:
            return self._add(functools.partial(_as_integers, torch.iinfo(dtype)), [place])
        if dtype.itemsize == 1:
            return self._add(lambda value: value.to(dtype).to(value.dtype), [place])
        return self._add(lambda value: value.to(dtype) if self.rounds else value, [place])

    def _of_source(self, plain: Element) -> int:
        place, runs = self._add(None, []), [self.over[axis] for axis in plain.axes if axis in self.over]
        if runs:
            self.rows[place] = plain, runs[0]
        else:
            self.values[place] = plain
        return place

    def _extreme(self, plain: Element, call: Node, reduce: Reduce) -> int:
        dim_at = 2 if call.target is aten.linalg_vector_norm.default else 1
        source, index, over = reduced(call, plain.index, dim_at)
        self.over |= {axis: over for part in over for axis in part.axes}
        before, place = len(self.rows), self.read(resolve(source, index))
        if not before < len(self.rows) <= MOST_EXTREMES:
            raise NoMatch(OTHER_VALUES, call)
        return self._add(reduce, [place])

    def _leaf(self, plain: Element) -> int:
        is_other = self.leaves or plain.axes & self.over.keys()
        if is_other or not is_parameter(plain.origin):
            what = f"codes or scales of tokens are computed from {name_of(plain.origin)}"
            raise NoMatch(f"{what}, expected from a value and the largest one", plain.origin)
        return super()._leaf(plain)


def are_close(one: Tensor, other: Tensor, beside: float = 0.0) -> bool:
    return bool(((one - other).abs() <= 1e-9 * other.abs().clamp(min=abs(beside))).all())


def _as_integers(limits: torch.iinfo, numbers: Tensor) -> Tensor:
    numbers = numbers.double().trunc()
    return torch.where((numbers >= limits.min) & (numbers <= limits.max), numbers, torch.nan)


def _extreme(node: Node) -> tuple[Node, Reduce] | None:
    """The call that computes an extreme of a row, and how."""
    call, place = args_of(node) if node.target is operator.getitem else (node, 0)
    if call.target is aten.linalg_vector_norm.default and argument(call, 1, "ord", 2) != math.inf:
        return None
    several = EXTREMES.get(call.target, ())
    return (call, several[place]) if place < len(several) else None


def source_of(rounded: Node) -> Node:
    """The last value that is rounded, and whose extremes are used, too. Raises NoMatch if there is none."""

    def is_end(node: Node) -> bool:
        return node.target not in WALKED

    walked = dict.fromkeys(computed_from(rounded, is_end))
    extremes = [node for node in walked if node.target in EXTREMES]
    if not extremes:
        raise NoMatch("the codes of tokens are not divided by a largest value", rounded)
    behind = (computed_from(args_of(extreme)[0], is_end) for extreme in extremes)
    shared = [node for nodes in behind if (node := next((node for node in nodes if node in walked), None)) is not None]
    if not shared:
        raise NoMatch(OTHER_VALUES, rounded)
    return element_of(max(shared)).seen[0]
