"""Whole numbers that a program rounds to, clamps and casts: what is rounded, and which numbers are kept on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.bounds import Bounds, bounded
from mla_fx.readings.calls import CASTS, args_of
from mla_fx.readings.element import Element, operand, resolve
from mla_fx.readings.reading import Reading

aten = torch.ops.aten
MOST_CALLS = 20  # between codes and what is rounded
# The dtypes that hold every code, from -128 to 127.
WHOLE = frozenset(
    {torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64}
)


@dataclass(frozen=True)
class Codes(Reading):
    """Codes of `value`. The calls in `whole`, on the way from the rounded value to the codes, get whole numbers, so
    they round nothing."""

    value: Element
    whole: tuple[Node, ...]


@dataclass(frozen=True)
class WholeNumbers:
    """The nearest whole numbers of `value`, which the program rounds at `rounded`, between two bounds.

    Casts on the way wrap whole numbers that are not in `held`."""

    value: Element
    rounded: Node
    bounds: Bounds
    held: Bounds
    calls: tuple[Node, ...]

    def check_held(self, low: float, high: float) -> None:
        """Raises NoMatch unless the casts on the way keep whole numbers from `low` to `high`."""
        if low < self.held.low or high > self.held.high:
            held, found = (f"{numbers.low:.6g} to {numbers.high:.6g}" for numbers in (self.held, Bounds(low, high)))
            said = f"codes from {found} are cast to integers from {held} and not clamped before, so they wrap"
            raise NoMatch(said, self.calls[0])


def whole_numbers(element: Element) -> WholeNumbers:
    """What an element is rounded from, to the nearest whole number. Raises NoMatch if it is not rounded so."""
    bounds, held = Bounds(), Bounds()
    node, index = element.origin, element.index
    calls = list[Node]()
    for _ in range(MOST_CALLS):
        calls.append(node)
        if (dtype := node.meta["val"].dtype) not in WHOLE:
            raise NoMatch(f"codes are stored in {dtype}, which does not hold all of them", node)
        if node.target is aten.round.default:
            break
        if (limited := bounded(node)) is not None and all(map(_is_whole, limited[1])):
            value, own = limited
            bounds, held = bounds.after(own), _held_behind(own, held)
        elif node.target in CASTS or node.target is aten.trunc.default:  # of whole numbers, if they are rounded before
            value, held = args_of(node)[0], _held_by(held, dtype)
        else:
            break
        found = operand(value, index)
        if found.factor != 1.0:
            break
        node, index, held = found.origin, found.index, _held_by(held, *found.roundings)
    if node.target is not aten.round.default:
        raise NoMatch(f"expected codes rounded to the nearest whole number, found {name_of(node)}", node)
    rounded = args_of(node)[0]
    quotient = resolve(rounded, index)
    held = _held_by(held, *quotient.roundings)
    while quotient.factor == 1.0 and (limited := bounded(quotient.origin)) is not None:
        inner, own = limited
        bounds, held = bounds.after(own), _held_behind(own, held)
        quotient = operand(inner, quotient.index)
        held = _held_by(held, *quotient.roundings)
    return WholeNumbers(quotient, rounded, bounds, held, tuple(calls))


def _is_whole(bound: float) -> bool:
    return math.isinf(bound) or bound.is_integer()


def _held_by(held: Bounds, *dtypes: torch.dtype) -> Bounds:
    """The whole numbers in `held` that casts keep. Floats round large ones, which matters only if some must be held."""
    for dtype in dtypes:
        if dtype.is_floating_point and held == Bounds():
            continue
        most = 2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max
        least = -most if dtype.is_floating_point else torch.iinfo(dtype).min
        held = Bounds(max(held.low, least), min(held.high, most))
    return held


def _held_behind(bounds: Bounds, held: Bounds) -> Bounds:
    """The numbers that are in `held` once they are bounded."""
    low = -math.inf if bounds.low >= held.low else held.low
    return Bounds(low, math.inf if bounds.high <= held.high else held.high)


def check_codes(element: Element) -> None:
    """Raises NoMatch unless an element is a whole number that int8 holds."""
    if element.origin.meta["val"].dtype == torch.int8:
        return
    low, high = whole_numbers(element).bounds
    if low < -128 or high > 127:
        raise NoMatch("the codes of tokens are not clamped to the range of int8", element.origin)
