"""Tokens that the program quantises: codes, and a scale for each token.

    m = max |value| over the columns,   codes = round(value * steps / m),   scale = m / steps

A program may clip values to a part of their largest one, `m = part * max |value|`. Then the largest code is that of
clipped values.

Kernels have 127 steps and compute in float32. Codes of a program that does not may differ from theirs by 1; then
`differences` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_product
from .axes import Index
from .calls import CASTS, args_of, argument, operands_of
from .clipping import clipped
from .constant import constant
from .element import Element, computed_between, is_coarser, is_parameter, operand, resolve
from .largest import largest
from .read_along import read_along
from .reading import Parts, Reading
from .same_value import same_value
from .vendor_calls import dynamic_quant, is_dynamic_quant

aten = torch.ops.aten
STEPS = 127.0
NEAR_STEPS = (STEPS, 127.5)
LARGEST_GUARD = 1.3e-4  # for a maximum; that of a normalised row is smaller only if all of the row is nearly zero
MOST_CALLS = 20  # between codes and what is rounded, or between a scale and a maximum
# The arguments that bound a value from below and from above.
LIMITS = {aten.clamp.default: (1, 2), aten.clamp_min.default: (1, None), aten.clamp_max.default: (None, 1)}
ARITHMETIC = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.reciprocal.default})
# The dtypes that hold every code, from -128 to 127.
WHOLE = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64}
)
BOUNDS = {aten.maximum.default: "below", aten.minimum.default: "above"}
OTHER_VALUES = "the codes of tokens are divided by the largest of other values"


@dataclass(frozen=True)
class Part(Parts):
    """`number * factor` of the largest value, to which values are clipped at `bound`; no `factor` is one."""

    bound: Element
    number: float
    factor: Element | None


@dataclass(frozen=True)
class QuantisedTokens(Reading):
    """Codes of `value`, along the indices of `over`, with a scale for each token. Without a `part`, values are not
    clipped."""

    value: Element
    over: tuple[Index, ...]
    differences: tuple[str, ...] = field(default=())
    whole: tuple[Node, ...] = field(default=())
    """The calls on the way from the rounded value to the codes. They get whole numbers, so they round nothing."""
    part: Part | None = None

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.differences, None if self.part is None else self.part.number


@dataclass(frozen=True)
class _Codes:
    """The nearest whole numbers of `value`, which the program rounds at `rounded`, between two bounds."""

    value: Element
    rounded: Node
    below: float
    above: float
    calls: tuple[Node, ...]


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
        if self.factor is None or other.factor is None:
            return self.factor is other.factor and same_value(self.maximum, other.maximum)
        return same_value(self.factor, other.factor) and same_value(self.maximum, other.maximum)


def quantised_tokens(element: Element, *, guard: float = LARGEST_GUARD) -> QuantisedTokens:
    """Read codes that carry one scale as quantised tokens. A bound of a largest value is a difference if it is above
    `guard`. Raises NoMatch if they are none, or if their values are clipped."""
    found = clipped_tokens(element, guard=guard)
    if found.part is not None:
        raise NoMatch("the values of tokens are clipped to a part of their largest one", element.origin)
    return found


def clipped_tokens(element: Element, *, guard: float) -> QuantisedTokens:
    """The same for values that may be clipped."""
    scales = () if element.scales is None else element.scales.by
    if len(scales) != 1:
        raise NoMatch(f"expected the codes of tokens with one scale, found {len(scales)} scales", element.origin)
    if is_dynamic_quant(element.origin):
        return QuantisedTokens(element.origin, *dynamic_quant(element, scales[0]))
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
        *_other_steps(steps),
        *_raised((*divisor.guards, *scale.guards), guard),
        *rounded_in("the codes of tokens are computed", codes.rounded, stops),
        *rounded_in("the scales of tokens are computed", scales[0].seen[0], stops),
    )
    factor = number * scale.number * each
    factor = 1.0 if math.isclose(factor, 1.0, rel_tol=5e-7) else factor
    return QuantisedTokens(element.origin, plain.times(factor), found, differences, codes.calls, part)


def _unclipped(value: Element, inside: Element, divisor: _Scale) -> tuple[Element, Part | None]:
    """Values before they are clipped to a part of the largest magnitude of `inside`, if they are."""
    clip = clipped(value)
    part = _part(None if clip is None else clip.bound, divisor, value.origin)
    if clip is None:
        return value, None
    if clip.value.factor != inside.factor:
        raise NoMatch(OTHER_VALUES, value.origin)
    return clip.value, part


def whole_numbers(element: Element) -> _Codes:
    """What an element is rounded from, to the nearest whole number. Raises NoMatch if it is not rounded so."""
    below, above = -math.inf, math.inf
    node, index = element.origin, element.index
    calls = list[Node]()
    for _ in range(MOST_CALLS):
        calls.append(node)
        if (dtype := node.meta["val"].dtype) not in WHOLE:
            raise NoMatch(f"codes are stored in {dtype}, which does not hold all of them", node)
        if node.target is aten.round.default:
            break
        bounded = _bounded(node)
        if bounded is not None:
            value, low, high = bounded
            below, above = max(below, low), min(above, high)
        elif node.target in CASTS or node.target is aten.trunc.default:  # of whole numbers, if they are rounded before
            value = args_of(node)[0]
        else:
            break
        found = operand(value, index)
        if found.factor != 1.0:
            break
        node, index = found.origin, found.index
    if node.target is not aten.round.default:
        raise NoMatch(f"expected codes rounded to the nearest whole number, found {name_of(node)}", node)
    rounded = args_of(node)[0]
    quotient = resolve(rounded, index)
    while quotient.factor == 1.0 and (bounded := _bounded(quotient.origin)) is not None:
        inner, low, high = bounded
        below, above = max(below, low), min(above, high)
        quotient = operand(inner, quotient.index)
    return _Codes(quotient, rounded, below, above, tuple(calls))


def check_codes(element: Element) -> None:
    """Raises NoMatch unless an element is a whole number that int8 holds."""
    if element.origin.meta["val"].dtype == torch.int8:
        return
    codes = whole_numbers(element)
    if codes.below < -128 or codes.above > 127:
        raise NoMatch("the codes of tokens are not clamped to the range of int8", element.origin)


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
        bounded = _bounded(element.origin)
        if number == 0 or not math.isfinite(number):
            raise NoMatch(f"the scale of a token is multiplied by {number:.6g}", element.origin)
        if bounded is None:
            guards = tuple(low * before / number for low, before in bounds)
            return _Scale(element, number, guards, given[0] if given else None)
        value, low, high = bounded
        if high != math.inf:
            break
        bounds.append((low, number))
        element = operand(value, element.index)
    raise NoMatch(f"expected the scale of a token, found {name_of(element.origin)}", element.origin)


def _part(bound: Element | None, divisor: _Scale, node: Node) -> Part | None:
    """The part of their largest value to which values are clipped; None if they are not.

    Raises NoMatch if it is not that of their scale."""
    if bound is None and divisor.factor is None:
        return None
    if bound is None:
        raise NoMatch("a scale is that of a part of the largest value, to which no value is clipped", node)
    found = _scale(bound)
    if not found.is_of(divisor):
        raise NoMatch("values are clipped to another part of their largest one than that of their scale", node)
    return Part(bound, found.number, found.factor)


def _check_range(codes: _Codes, steps: float, node: Node) -> None:
    if not any(math.isclose(steps, near, rel_tol=1e-3) for near in NEAR_STEPS):
        raise NoMatch(f"the largest code of a token is {steps:.6g}, expected 127", node)
    if codes.below > -STEPS or codes.above < STEPS:
        raise NoMatch(f"the codes of tokens are clamped to {codes.below:.6g} and {codes.above:.6g}", node)


# --- differences from a kernel ---------------------------------------------------------------------------------------


def _other_steps(steps: float) -> Iterator[str]:
    if not math.isclose(steps, STEPS, rel_tol=1e-6):
        yield f"the largest code of a token is {steps:.6g}, of a kernel 127"


def _raised(guards: tuple[float, ...], allowed: float) -> Iterator[str]:
    if any(guard > allowed for guard in guards):
        yield f"the largest value of a token counts as {max(guards):.3g} at least, in a kernel as it is"


def rounded_in(what: str, start: Node, stops: set[Node]) -> Iterator[str]:
    """Whether a product between a node and `stops` is rounded to 16 bits."""
    for node in computed_between(start, stops):
        if not isinstance(node.meta["val"], torch.Tensor):
            continue  # the parts of a split
        dtype = node.meta["val"].dtype
        given = (operand.meta["val"] for operand in operands_of(node))
        wider = any(is_coarser(dtype, value.dtype) for value in given if isinstance(value, torch.Tensor))
        if is_coarser(dtype, torch.float32) and (wider or node.target in ARITHMETIC):
            yield f"{what} in {dtype}, in a kernel in torch.float32"
            return


def _bounded(node: Node) -> tuple[Node, float, float] | None:
    """What a call bounds, from below and from above, if it does this and nothing else."""
    if node.target in BOUNDS:
        values = args_of(node)[:2]
        numbers = [constant(value) for value in values]
        if (numbers[0] is None) == (numbers[1] is None):
            return None
        (number,) = (number for number in numbers if number is not None)
        value = values[0] if numbers[0] is None else values[1]
        return (value, number, math.inf) if BOUNDS[node.target] == "below" else (value, -math.inf, number)
    if node.target not in LIMITS:
        return None
    bounds = []
    for place, none in zip(LIMITS[node.target], (-math.inf, math.inf), strict=True):
        given = None if place is None else argument(node, place)
        bounds.append(none if given is None else constant(given))
    low, high = bounds
    return None if low is None or high is None else (args_of(node)[0], low, high)


def unbounded(element: Element) -> Element:
    """What an element is before it is bounded, if it is."""
    while element.factor == 1.0 and (found := _bounded(element.origin)) is not None:
        element = operand(found[0], element.index)
    return element
