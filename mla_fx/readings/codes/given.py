"""Codes with a scale that is given: the nearest whole numbers of a value times it, clamped to the range of int8.

The scale may be a number, or a tensor that is the same along some axes of the value. Codes of a program that divides by
it, or multiplies in 16 bits, may differ from an operator's by 1; `differences` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Index
from mla_fx.readings.bounds import Bounds
from mla_fx.readings.calls import CASTS, DIVIDES, MULTIPLIES, args_of
from mla_fx.readings.constant import constant
from mla_fx.readings.element import Element, computed_between, narrows, operand, resolve
from mla_fx.readings.views import MOVERS, Place

from .whole_numbers import ADDS, ZERO_POINT, Codes, WholeNumbers, whole_numbers

aten = torch.ops.aten
RANGE = (-128.0, 127.0)


@dataclass(frozen=True)
class StaticCodes(Codes):
    """Codes of a value multiplied by `scale`, or by `number` if there is none; divided by it if `is_divided`. `dtypes`
    are those from the product to the rounding."""

    scale: Element | None
    number: float
    is_divided: bool
    dtypes: tuple[torch.dtype, ...]

    @property
    def constants(self) -> tuple[Any, ...]:
        return self.number, self.is_divided, self.dtypes

    def differences(self, wide: torch.dtype) -> Iterator[str]:
        """Why codes may differ from those of an operator that multiplies by the scale in `wide`."""
        if self.is_divided:
            yield "codes are divided by a scale; the operator multiplies"
        other = next((dtype for dtype in self.dtypes if dtype != wide), None)
        if other is not None:
            yield f"codes are computed in {other}, by the operator in {wide}"


def static_codes(element: Element) -> Iterator[StaticCodes]:
    """Read codes in int8, in each way to tell their value from its scale. Raises NoMatch if they are none."""
    node = element.origin
    if node.meta["val"].dtype != torch.int8:
        raise NoMatch(f"expected codes in torch.int8, found {node.meta['val'].dtype}", node)
    codes = whole_numbers(element)
    if (bounds := codes.bounded(Bounds())) != RANGE:
        raise NoMatch(f"the codes are clamped to {bounds.low:.6g} and {bounds.high:.6g}, expected -128 and 127", node)
    (product, index), dtypes = _before_casts(codes)
    _check_zero_point(product, index)
    ways = [*_ways(product, index)]
    if not ways:
        raise NoMatch("codes are rounded from a product of values, expected one value and its scale", product)
    for value, scale, number in ways:
        is_divided = product.target in DIVIDES
        yield StaticCodes(node, value, codes.calls, scale, number, is_divided, dtypes)


def _before_casts(codes: WholeNumbers) -> tuple[Place, tuple[torch.dtype, ...]]:
    """Where a value is computed or read, before casts, and the dtypes that it has from there until it is rounded."""
    node, index = codes.value.seen
    dtypes = [*codes.dtypes, node.meta["val"].dtype]
    while node.target in CASTS and args_of(node)[0].meta["val"].is_floating_point():
        node, index = operand(args_of(node)[0], index).seen
        dtypes.append(node.meta["val"].dtype)
    is_multiplied = node.target in MULTIPLIES | DIVIDES
    return (node, index), tuple(dict.fromkeys(dtypes)) if is_multiplied else ()


def _check_zero_point(node: Node, index: tuple[Index, ...]) -> None:
    """Raises NoMatch if a sum has a term that is the same along some axes, as no rotation has."""
    if node.target not in ADDS:
        return
    one, other = args_of(node)[:2]
    is_number = constant(one) is not None or constant(other) is not None
    if is_number or operand(one, index).axes != operand(other, index).axes:
        raise NoMatch(ZERO_POINT, node)


def _ways(node: Node, index: tuple[Index, ...]) -> Iterator[tuple[Element, Element | None, float]]:
    """The value and its scale, or a number."""
    if node.target not in MULTIPLIES | DIVIDES:
        yield resolve(node, index), None, 1.0
        return
    left, right = args_of(node)[:2]
    pairs = [(left, right)] if node.target in DIVIDES else [(left, right), (right, left)]
    for value, number in pairs:
        if (known := constant(number)) is not None:
            yield operand(value, index), None, known
            return
    for one, other in pairs:
        value, scale = operand(one, index), operand(other, index)
        if scale.axes <= value.axes:
            yield value, scale, 1.0


def computed_otherwise(start: Node, stops: Set[Node], wide: torch.dtype) -> list[Node]:
    """The calls between a value and `stops` that compute in another dtype than `wide` or round to one, in order."""
    calls = filter(_computes, computed_between(start, stops))
    return sorted(call for call in calls if call.meta["val"].dtype.to_real() != wide)


def _computes(node: Node) -> bool:
    """Whether a call computes numbers or rounds them, so it does more than move them, negate them or widen them."""
    value = node.meta.get("val")
    is_kept = node.target in MOVERS or node.target is aten.neg.default
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return narrows(node) if node.target in CASTS or is_kept else True
