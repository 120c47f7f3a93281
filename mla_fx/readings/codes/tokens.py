"""Tokens that the program quantises: codes, and a scale for each token. The largest magnitude is read in any spelling.

    m = max |value| over the columns,   codes = round(value * steps / m),   scale = m / steps

A program may clip values to a part of their largest one, `m = part * max |value|`. Then the largest code is that of
clipped values.

Kernels have 127 steps and compute in float32. Codes of a program that does not may differ from theirs by 1; then
`differences` says why."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.algebra import as_product
from mla_fx.readings.axes import Index
from mla_fx.readings.bounds import Clipped, bounded, clipped
from mla_fx.readings.calls import DIVIDES, MULTIPLIES, args_of, argument
from mla_fx.readings.contraction import reduced
from mla_fx.readings.element import (
    Element,
    computed_between,
    is_coarser,
    is_parameter,
    narrows,
    operand,
    operands,
    resolve,
)
from mla_fx.readings.same_value import read_along, same_value

from .vendor_calls import dynamic_quant, is_dynamic_quant
from .whole_numbers import Codes, WholeNumbers, whole_numbers

aten = torch.ops.aten
STEPS = 127.0
NEAR_STEPS = (STEPS, 127.5)
MOST_CALLS = 20  # between a scale and a maximum
ARITHMETIC = MULTIPLIES | DIVIDES | {aten.reciprocal.default}
OTHER_VALUES = "the codes of tokens are divided by the largest of other values"
Largest = tuple[Element, tuple[Index, ...]]


class ClippedTo(NamedTuple):
    """What values are clipped to: `number * factor` of their largest one; no `factor` is one."""

    clip: Clipped
    number: float
    factor: Element | None


@dataclass(frozen=True)
class QuantisedTokens(Codes):
    """Codes along the indices of `over`, with a scale for each token."""

    over: tuple[Index, ...]
    differences: tuple[str, ...]

    @property
    def constants(self) -> tuple[Any, ...]:
        return (self.differences,)


@dataclass(frozen=True)
class _Scale:
    """`number * factor * maximum`, where a factor is a graph input; `guards` are the bounds that the program gives to
    the maximum, from below."""

    maximum: Element
    number: float
    guards: tuple[float, ...]
    factor: Element | None

    def is_of(self, other: _Scale) -> bool:
        """Whether both are the same but for their numbers."""
        mine, theirs = self.factor, other.factor
        is_alike = mine is theirs if mine is None or theirs is None else same_value(mine, theirs)
        return is_alike and same_value(self.maximum, other.maximum)


def quantised_tokens(element: Element) -> QuantisedTokens:
    """Read codes that carry one scale as quantised tokens. Raises NoMatch if they are none, or if their values are
    clipped."""
    found, part = clipped_tokens(element)
    if part is not None:
        raise NoMatch("the values of tokens are clipped to a part of their largest one", element.origin)
    return found


def clipped_tokens(element: Element) -> tuple[QuantisedTokens, ClippedTo | None]:
    """The same for values that may be clipped, and to what they are."""
    scales = () if element.scales is None else element.scales.by
    if len(scales) != 1:
        raise NoMatch(f"expected the codes of tokens with one scale, found {len(scales)} scales", element.origin)
    if is_dynamic_quant(element.origin):
        value, over = dynamic_quant(element, scales[0])
        return QuantisedTokens(element.origin, value, (), over, ()), None
    codes, scale = whole_numbers(element), _scale(scales[0])
    divisors = [factor for factor, power in as_product(codes.value).factors if power == -1.0]
    divisor = _divisor(divisors, element.origin)
    if not divisor.is_of(scale):
        raise NoMatch("the codes of tokens are multiplied by a scale that they were not divided by", element.origin)
    inside, over = largest(divisor.maximum)
    whole = as_product(codes.value, kept=inside.origin)
    values = [factor for factor, power in whole.factors if power == 1.0]
    if len(values) != 1 or len(whole.factors) != 1 + len(divisors):
        raise NoMatch(OTHER_VALUES, element.origin)
    value, part = _unclipped(values[0], inside, divisor)
    number, plain = value.apart()
    found = read_along(plain, inside.apart()[1], over)
    if found is None:
        raise NoMatch(OTHER_VALUES, element.origin)
    each = whole.number / divisor.number  # the code of a value is this times it, divided by the maximum
    steps = each / abs(inside.factor) if part is None else each * part.number
    _check_range(codes, steps, element.origin)
    stops = {plain.seen[0], divisor.maximum.origin, scale.maximum.origin}
    differences = (
        *_differences(steps, (*divisor.guards, *scale.guards), part),
        *rounded_in("the codes of tokens are computed", codes.rounded, stops),
        *rounded_in("the scales of tokens are computed", scales[0].seen[0], stops),
    )
    factor = number * scale.number * each
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=5e-7) else factor
    return QuantisedTokens(element.origin, plain.times(factor), codes.calls, found, differences), part


def _divisor(factors: list[Element], node: Node) -> _Scale:
    """Read what codes are divided by: a scale, or a largest value and a graph input."""
    given = [factor for factor in factors if is_parameter(factor.origin)]
    others = [factor for factor in factors if factor not in given]
    if len(others) != 1 or len(given) > 1:
        raise NoMatch("the codes of tokens are not divided by one scale", node)
    found = _scale(others[0])
    if given and found.factor is not None:
        raise NoMatch("the codes of tokens are divided by the product of a scale and another", node)
    return replace(found, factor=given[0]) if given else found


def _scale(element: Element) -> _Scale:
    """Read a scale as a number times a largest value, which may be bounded from below on the way, and multiplied by a
    graph input."""
    number, bounds, given = 1.0, list[tuple[float, float]](), list[Element]()
    for _ in range(MOST_CALLS):
        whole = as_product(element)
        others = [pair for pair in whole.factors if pair[1] != 1.0 or not is_parameter(pair[0].origin)]
        given += [factor for factor, _ in whole.factors if (factor, 1.0) not in others]
        if [power for _, power in others] != [1.0] or len(given) > 1:
            break
        number *= whole.number
        element = others[0][0]
        found = bounded(element.origin)
        if not 0 < number < math.inf:
            raise NoMatch(f"the scale of a token is multiplied by {number:.6g}", element.origin)
        if found is None:
            guards = tuple(low * before / number for low, before in bounds)
            return _Scale(element, number, guards, given[0] if given else None)
        value, own = found
        if own.high != math.inf:
            break
        bounds.append((own.low, number))
        element = operand(value, element.index)
    raise NoMatch(f"expected the scale of a token, found {name_of(element.origin)}", element.origin)


def _unclipped(value: Element, inside: Element, divisor: _Scale) -> tuple[Element, ClippedTo | None]:
    """Values before they are clipped to a part of the largest magnitude of `inside`, if they are. Raises NoMatch if it
    is not that of their scale."""
    clip = clipped(value)
    if clip is None and divisor.factor is None:
        return value, None
    if clip is None:
        raise NoMatch("a scale is that of a part of the largest value, to which no value is clipped", value.origin)
    found = _scale(clip.bound)
    if not found.is_of(divisor) or found.guards != divisor.guards:
        raise NoMatch("values are clipped to another part of their largest one than that of their scale", value.origin)
    if clip.value.factor != inside.factor:
        raise NoMatch(OTHER_VALUES, value.origin)
    return clip.value, ClippedTo(clip, found.number, found.factor)


def _check_range(codes: WholeNumbers, steps: float, node: Node) -> None:
    if not any(math.isclose(steps, near, rel_tol=1e-3) for near in NEAR_STEPS):
        raise NoMatch(f"the largest code of a token is {steps:.6g}, expected 127", node)
    low, high = codes.bounds
    if low > -STEPS or high < STEPS:
        raise NoMatch(f"the codes of tokens are clamped to {low:.6g} and {high:.6g}", node)
    codes.check_held(-round(steps), round(steps))


# --- differences from a kernel ---------------------------------------------------------------------------------------


def _differences(steps: float, guards: tuple[float, ...], part: ClippedTo | None) -> Iterator[str]:
    if not math.isclose(steps, STEPS, rel_tol=1e-6):
        yield f"the largest code of a token is {steps:.6g}, of a kernel 127"
    if any(guard > 0 for guard in guards):  # a row may be as small as its norm's weight is, so any of them may act
        yield f"the largest value of a token counts as {max(guards):.3g} at least, in a kernel as it is"
    if part is not None and part.factor is not None and part.clip.is_high_last:
        name = name_of(part.factor.origin)  # which may make the bound negative
        yield f"values are clipped from below first, in a kernel from above: it matters where {name} is negative"


def rounded_in(what: str, start: Node, stops: set[Node]) -> Iterator[str]:
    """Whether a product between a node and `stops` is rounded to 16 bits."""
    for node in computed_between(start, stops):
        value = node.meta["val"]  # or the parts of a split
        is_narrow = isinstance(value, torch.Tensor) and is_coarser(value.dtype, torch.float32)
        if is_narrow and (node.target in ARITHMETIC or narrows(node)):
            yield f"{what} in {value.dtype}, in a kernel in torch.float32"
            return


def largest(element: Element) -> Largest:
    """The value whose largest magnitude this is, and the indices that it is taken over. Raises NoMatch if there is
    none."""
    node, index = element.node, element.index
    if node.target is aten.linalg_vector_norm.default and argument(node, 1, "ord", 2) == math.inf:
        return _reduced(node, index, dim_at=2)
    if node.target is aten.maximum.default:
        return _of_both_ends(element)
    value, over = _end(element, aten.amax.default, aten.max.dim, place=1)
    if value.origin.target is not aten.abs.default:
        raise NoMatch(f"expected the largest magnitude, found the largest {name_of(value.origin)}", value.origin)
    number, value = value.apart()
    if number < 0:
        raise NoMatch("expected the largest magnitude, found a negative one", value.origin)
    return resolve(args_of(value.node)[0], value.index, number), over


def _of_both_ends(element: Element) -> Largest:
    """`max(-smallest, largest)`, where either may be bounded by zero first."""
    negative = [side for side in operands(element) if side.factor < 0]
    positive = [side for side in operands(element) if side.factor > 0]
    if len(negative) != 1 or len(positive) != 1 or -negative[0].factor != positive[0].factor:
        raise NoMatch("expected the largest magnitude, found another maximum", element.origin)
    number, high = positive[0].apart()
    low = negative[0].apart()[1]
    bottom, over = _end(_unbounded(low, aten.minimum.default), aten.amin.default, aten.min.dim, place=0)
    top, others = _end(_unbounded(high, aten.maximum.default), aten.amax.default, aten.max.dim, place=1)
    same = {other.axis: part for other, part in zip(others, over, strict=False) if other.axis is not None}
    if len(others) != len(over) or bottom.factor < 0 or top.at(same) != bottom:
        raise NoMatch("expected the largest magnitude, found the ends of two values", element.origin)
    return bottom.times(number), over


def _unbounded(element: Element, bound: object) -> Element:
    """An end before it is bounded by zero: which end it is decides the sign of the magnitude, not its size."""
    node = element.node
    if node.target is not bound:
        return element
    found = bounded(node)
    if found is None or 0.0 not in found[1]:
        raise NoMatch(f"expected a bound of zero, found {name_of(node)}", node)
    return operand(found[0], element.index)


def _end(element: Element, reduction: object, with_places: object, *, place: int) -> Largest:
    """What one end, the smallest or the largest, is taken of."""
    node = element.node
    if node.target is reduction:
        return _reduced(node, element.index)
    if node.target is operator.getitem:
        source, number = args_of(node)
        if source.target is with_places and number == 0:
            return _reduced(source, element.index)
        if source.target is aten.aminmax.default and number == place:
            return _reduced(source, element.index)
    raise NoMatch(f"expected a largest value, found {name_of(node)}", node)


def _reduced(node: Node, index: tuple[Index, ...], dim_at: int = 1) -> Largest:
    source, read, over = reduced(node, index, dim_at)
    return resolve(source, read), over
