"""Arithmetic on few numbers: an element as a function of those elements that no arithmetic computes, its leaves.

Some formulas have many spellings. Instead of matching them, a reading can do the arithmetic itself, at points of its
choice. Steps are analytic here, or have a switch between two analytic pieces, or test for what is infinite, NaN or a
weight of zero. Two formulas of such steps that agree at many points on both sides of each switch agree wherever they
are finite: see `Points`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of
from mla_fx.ops.emitted.attention.tiles import LOWEST
from mla_fx.ops.emitted.merge_attention import MOST_PARTS

from .axes import Axis, Index, one_axis
from .calls import CASTS, args_of, operands_of, options_of
from .conditions import MASKED_FILL
from .constant import constant
from .contraction import PRODUCTS, contraction, reduced
from .element import Element, operand, resolve
from .points import FAR, Points
from .views import MOVERS, has_dim, shape_of

aten = torch.ops.aten

SOFTMAX = frozenset({aten._softmax.default, aten.softmax.int, aten._safe_softmax.default})
LOG_SOFTMAX = frozenset({aten._log_softmax.default, aten.log_softmax.int})
EXPONENTIALS: dict[Any, float] = {aten.exp.default: 1.0, aten.exp2.default: math.log(2)}
"""Each is `exp(number * x)`."""
LOGARITHMS: dict[Any, float] = {aten.log.default: 1.0, aten.log2.default: math.log(2), aten.logsumexp.default: 1.0}
"""Each, times the number, is the natural logarithm."""
MOST_STEPS = 1000
MOST_TERMS = MOST_PARTS + 1  # parts and a sink
CLOSE = 1e-11
CLAMPS = frozenset(
    {
        aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor, aten.clamp_min.Tensor,
        aten.clamp_max.Tensor,
    }
)  # fmt: skip
TESTS = frozenset({aten.eq.Scalar, aten.ne.Scalar})
POINTWISE = frozenset(
    {
        *EXPONENTIALS, aten.log.default, aten.log2.default, aten.log1p.default, aten.expm1.default, aten.add.Tensor,
        aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.reciprocal.default,
        aten.sigmoid.default, aten.lerp.Tensor, aten.maximum.default, aten.minimum.default, aten.abs.default,
        aten.logaddexp.default, aten.logaddexp2.default, aten.addcmul.default,
    }
)  # fmt: skip
GUARDS = frozenset(
    {
        *MASKED_FILL, aten.where.self, aten.nan_to_num.default, aten.isnan.default, aten.isinf.default,
        aten.isneginf.default, aten.isposinf.default, aten.isfinite.default, aten.logical_or.default,
        aten.logical_and.default, aten.logical_not.default, aten.bitwise_or.Tensor, aten.bitwise_and.Tensor,
        aten.bitwise_not.default, *CLAMPS,
    }
)  # fmt: skip
REDUCTIONS = frozenset({aten.sum.dim_IntList, aten.amax.default, aten.logsumexp.default})
WEIGHTS = SOFTMAX | {*EXPONENTIALS, aten.sigmoid.default}
KEEP_SIGNS = frozenset(
    {
        aten.sum.dim_IntList, aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.where.self, aten.clamp.default,
        aten.clamp_min.default, aten.nan_to_num.default, *MASKED_FILL,
    }
)  # fmt: skip
LARGER = frozenset({aten.maximum.default, aten.minimum.default})
FIRST_OF_SEVERAL = frozenset({aten.max.dim, aten.log_sigmoid_forward.default})
STEPS = POINTWISE | GUARDS | TESTS | REDUCTIONS | SOFTMAX | FIRST_OF_SEVERAL

Step = Callable[..., Tensor]


@dataclass
class Arithmetic:
    """Steps, each with the places of its operands among the results of others. A leaf has no step."""

    leaves: dict[int, Element] = field(default_factory=dict)
    """Each by the place of its value."""

    steps: list[tuple[Step | None, tuple[int, ...]]] = field(default_factory=list)
    places: dict[tuple[Node, tuple[Index, ...]], int] = field(default_factory=dict)
    switches: dict[int, Node] = field(default_factory=dict)
    """Places of numbers whose signs choose between two pieces, and the calls that choose."""

    free: dict[int, float] = field(default_factory=dict)
    """Leaves that are no elements: numbers from 0 to this, on which no result may depend."""

    scales: tuple[float, ...] = (0.0, 1.0, 1.0, 30.0, 1e3, 1e6, 1e20, 3e38)
    """Logarithms are of these orders of magnitude: masks of the lowest number make huge ones."""

    rounding: float = 0.0
    """The relative error of logarithms in exponents."""

    def read(self, element: Element) -> int:
        """The place of an element's value. Raises NoMatch for one that is not a float."""
        factor, plain = element.apart()
        key = plain.node, plain.index
        if key not in self.places:
            self.places[key] = self._computed(plain)
        place = self.places[key]
        return place if factor == 1.0 else self._add(functools.partial(operator.mul, factor), [place])

    def value(self, place: int, points: Points, leaves: Sequence[int]) -> Tensor:
        """The values at a place, for points in float64 whose rows are the values of some leaves."""
        return self._values([place], points, leaves)[0]

    def points(self, parts: int, logarithms: int, leaves: Sequence[int]) -> Points:
        """Points on both sides of each switch. Raises NoMatch if one has a side that no point reaches."""
        drawn = Points.drawn(parts, logarithms, self.scales, (*self.free.values(),))
        if not self.switches:
            return drawn

        def switches(points: Points) -> Tensor:
            return torch.stack(self._values([*self.switches], points, leaves))

        points = drawn.beside(switches)
        values = switches(points)
        with_empty = torch.cat((values, *map(switches, points.with_empty_parts())), 1)
        for call, ordinary, every in zip(self.switches.values(), values, with_empty, strict=True):
            is_parted = all((side * ordinary > 0).any() for side in (-1, 1))
            closest = ordinary.abs().min()
            is_certain = all((side * every > 0).any() for side in (-1, 1)) and not FAR < closest < -LOWEST
            if not (is_parted or is_certain or ordinary.isinf().all()):
                raise NoMatch(f"{name_of(call)} has a case that no attention provably reaches", call)
        return points

    def _values(self, places: Sequence[int], points: Points, leaves: Sequence[int]) -> list[Tensor]:
        found = self.computed(dict(zip(leaves, points.values, strict=True)))
        return [found[place].expand_as(points.values[0]) for place in places]

    def computed(self, given: Mapping[int, Tensor]) -> list[Tensor]:
        """The values at all places, for those of the leaves."""
        found: list[Tensor] = []
        for number, (step, operands) in enumerate(self.steps):
            found.append(given[number] if step is None else step(*(found[one] for one in operands)))
        return found

    def is_close(self, one: Tensor, other: Tensor, points: Points) -> bool:
        """Whether two values are equal but for rounding: that of sums, and that of logarithms in exponents."""
        size = points.shared(points.outs.abs()).clamp(min=1)
        error = CLOSE + self.rounding * points.lses.nan_to_num(0, 0, 0).abs().amax(0)
        return bool(((one - other).abs() <= error * size).all())

    def _add(self, step: Step | None, given: Sequence[int]) -> int:
        if len(self.steps) == MOST_STEPS:
            raise NoMatch(f"arithmetic of more than {MOST_STEPS} steps")
        self.steps.append((step, tuple(given)))
        return len(self.steps) - 1

    def _computed(self, plain: Element) -> int:
        node = plain.node
        number = constant(node)
        if number is not None:
            return self._add(functools.partial(torch.full, (), number, dtype=torch.float64), [])
        found = self._pointwise(plain) if node.target in POINTWISE | GUARDS | TESTS else self._over_terms(plain)
        return self._leaf(plain) if found is None else found

    def _leaf(self, plain: Element) -> int:
        if not plain.dtype.is_floating_point:
            raise NoMatch(f"expected arithmetic on floats, found {name_of(plain.origin)}", plain.origin)
        place = self._add(None, [])
        self.leaves[place] = plain
        return place

    def _pointwise(self, plain: Element) -> int | None:
        node = plain.origin
        args, options = args_of(node), options_of(node)
        if "rounding_mode" in options or (node.target in TESTS and not _is_guard(node)):
            return None
        tensors = [number for number, value in enumerate(args) if isinstance(value, Node)]
        if any(not isinstance(args[number].meta["val"], Tensor) for number in tensors):
            return None

        def step(*values: Tensor) -> Tensor:
            given: list[Any] = list(args)
            for number, value in zip(tensors, values, strict=True):
                given[number] = value
            result: Tensor = node.target(*given, **options)  # type: ignore[operator]  # an operator
            return result

        given = [self.read(operand(args[number], plain.index)) for number in tensors]
        self._switch(node, given)
        return self._add(step, given)

    def _switch(self, node: Node, given: Sequence[int]) -> None:
        """Note where a step changes from one piece to another."""
        if node.target in CLAMPS:
            limits = (limit for limit in args_of(node)[1:] if isinstance(limit, (int, float)) and math.isfinite(limit))
            self.switches |= {self._add(functools.partial(operator.add, -limit), given[:1]): node for limit in limits}
            self.switches |= {self._add(torch.sub, [given[0], limit]): node for limit in given[1:]}
        elif node.target in LARGER:
            self.switches[self._add(torch.sub, given)] = node
        elif node.target is aten.abs.default:
            self.switches[given[0]] = node

    def _maximum(self, node: Node, terms: Sequence[int]) -> int:
        """The largest of several numbers: each may be it."""
        for term in terms if len(terms) > 1 else ():
            others = (other for other in terms if other != term)
            self.switches[self._add(lambda one, *others: one - _most(*others), [term, *others])] = node
        return self._add(_most, terms)

    def _over_terms(self, plain: Element) -> int | None:
        """A sum, a maximum, a softmax or a product over few terms."""
        node = plain.origin
        if node.target in REDUCTIONS:
            source, index, over = reduced(node, plain.index)
            axis = _few(over)
            if axis is None:
                return None
            terms = self._terms(resolve(source, index), axis)
            if node.target is aten.amax.default:
                return self._maximum(node, terms)
            return self._add(lambda *values: _reduce(node.target, _stacked(values)), terms)
        if node.target in SOFTMAX:
            return self._share(plain)
        if node.target is operator.getitem and args_of(node)[1] == 0:
            return self._first_of(args_of(node)[0], plain)
        return self._product(plain) if node.target in PRODUCTS else None

    def _first_of(self, call: Node, plain: Element) -> int | None:
        """The first result of a call that returns several."""
        if call.target is aten.log_sigmoid_forward.default:
            return self._add(torch.nn.functional.logsigmoid, [self.read(operand(args_of(call)[0], plain.index))])
        source, index, over = reduced(call, plain.index) if call.target is aten.max.dim else (call, (), ())
        axis = _few(over)
        return None if axis is None else self._maximum(call, self._terms(resolve(source, index), axis))

    def _terms(self, element: Element, axis: Axis) -> list[int]:
        return [self.read(element.at({axis: Index(number)})) for number in range(int(axis.size))]

    def _share(self, plain: Element) -> int | None:
        """One of few probabilities."""
        value, given = args_of(plain.origin)[:2]
        if not has_dim(len(plain.index), given):
            return None
        dim = given % len(plain.index)
        size, which = shape_of(plain.origin)[dim], plain.index[dim]
        if which.terms or not isinstance(which.offset, int) or not isinstance(size, int) or size > MOST_TERMS:
            return None
        places = (Index(number) for number in range(size))
        logits = [operand(value, (*plain.index[:dim], place, *plain.index[dim + 1 :])) for place in places]

        def step(*values: Tensor) -> Tensor:
            return _stacked(values).softmax(0)[which.offset]

        return self._add(step, list(map(self.read, logits)))

    def _product(self, plain: Element) -> int | None:
        """A product over stacked values, and not over the columns of one."""
        found = attempt(contraction, plain)
        axis = None if found is None else _few(found.over)
        if found is None or axis is None or not (_is_stacked(found.left, axis) or _is_stacked(found.right, axis)):
            return None
        pairs = zip(self._terms(found.left, axis), self._terms(found.right, axis), strict=True)
        given = [place for pair in pairs for place in pair]

        def step(*values: Tensor) -> Tensor:
            terms = (left * right for left, right in zip(values[::2], values[1::2], strict=True))
            return found.factor * functools.reduce(torch.add, terms)

        return self._add(step, given)


def is_step(node: Node) -> bool:
    """Whether a call may be arithmetic on few numbers."""
    if node.target not in PRODUCTS:
        return node.target in STEPS
    inner = shape_of(operands_of(node)[0])[-1]
    return isinstance(inner, int) and inner <= MOST_TERMS


def _is_guard(test: Node) -> bool:
    """Whether this tests for infinity, or a weight for zero."""
    value, number = args_of(test)[:2]
    if not isinstance(number, (int, float)) or not isinstance(value, Node):
        return False
    return math.isinf(number) or (number == 0 and _is_weight(value))


def _is_weight(value: Node) -> bool:
    """Whether a value is positive, but for what underflows."""
    number = constant(value)
    if number is not None or value.target in WEIGHTS:
        return number is None or number >= 0
    moves = value.target in MOVERS or value.target in CASTS or value.target is aten.cat.default
    if not moves and value.target not in KEEP_SIGNS:
        return False
    given: Sequence[Any] = operands_of(value) if moves else args_of(value)
    values = [(part, part.meta["val"]) for part in given if isinstance(part, Node)]
    if not all(isinstance(value, Tensor) for _, value in values):  # the first result of several
        return False
    tensors = [part for part, value in values if value.is_floating_point()]
    numbers = [part for part in given if isinstance(part, (int, float))]
    return bool(tensors) and all(map(_is_weight, tensors)) and all(number >= 0 for number in numbers)


def are_few(element: Element, over: tuple[Index, ...]) -> bool:
    """Whether a reduction is over few values, each computed by another operation."""
    axis = _few(over)
    return axis is not None and _is_stacked(element, axis)


def _is_stacked(element: Element, axis: Axis) -> bool:
    """Whether another operation computes each term."""
    origins = {element.at({axis: Index(number)}).origin for number in range(int(axis.size))}
    return len(origins) == axis.size


def _few(over: tuple[Index, ...]) -> Axis | None:
    axis = one_axis(over)
    return axis if axis is not None and isinstance(axis.size, int) and axis.size <= MOST_TERMS else None


def _reduce(target: Any, values: Tensor) -> Tensor:
    result: Tensor = target(values, [0])
    return result


def _most(*values: Tensor) -> Tensor:
    return _stacked(values).amax(0)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """Numbers may be among them."""
    most = max(values, key=Tensor.numel)
    return torch.stack([value.expand_as(most) for value in values])
