"""Values that the program bounds: by numbers, or clipped to plus and minus a bound that it computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .calls import args_of, argument
from .constant import constant
from .element import Element, operand
from .same_value import same_value

aten = torch.ops.aten
BOTH, LOW, HIGH = (1, 2), (1, None), (None, 1)  # the places of the lower and the upper bound among the arguments
EITHER_ORDER = {aten.maximum.default: LOW, aten.minimum.default: HIGH}
BY_NUMBERS = {aten.clamp.default: BOTH, aten.clamp_min.default: LOW, aten.clamp_max.default: HIGH, **EITHER_ORDER}
BY_TENSORS = {aten.clamp.Tensor: BOTH, aten.clamp_min.Tensor: LOW, aten.clamp_max.Tensor: HIGH, **EITHER_ORDER}
PLACES: dict[Any, tuple[int | None, int | None]] = {**BY_NUMBERS, **BY_TENSORS}


class Bounds(NamedTuple):
    """Numbers below `low` become `low`, then numbers above `high` become `high`."""

    low: float = -math.inf
    high: float = math.inf

    def of(self, number: float) -> float:
        return min(max(number, self.low), self.high)

    def after(self, inner: Bounds) -> Bounds:
        """Both in turn, `inner` first."""
        return Bounds(self.of(inner.low), self.of(inner.high))


@dataclass(frozen=True)
class Clipped:
    """`value` between `-bound` and `bound`. Where `bound` is negative, the limit that comes last counts:
    `min(max(value, -bound), bound)` is `bound`, and with `is_high_last` the program computes that."""

    value: Element
    bound: Element
    is_high_last: bool


def bounded(node: Node) -> tuple[Node, Bounds] | None:
    """What a call bounds by numbers; None if it does not."""
    if node.target not in BY_NUMBERS:
        return None
    value, *limits = _limits(node)
    pairs = zip(limits, Bounds(), strict=True)
    low, high = (none if limit is None else constant(limit) for limit, none in pairs)
    return None if low is None or high is None else (value, Bounds(low, high))


def unbounded(element: Element) -> Element:
    """What an element is before it is bounded by numbers, if it is."""
    while element.factor == 1.0 and (found := bounded(element.origin)) is not None:
        element = operand(found[0], element.index)
    return element


def clipped(element: Element) -> Clipped | None:
    """Read an element as a clipped value; None if no tensor bounds it. Raises NoMatch if the bounds are not plus and
    minus one value, or if it is rounded after it is clipped."""
    if element.origin.target not in BY_TENSORS:
        return None
    if element.roundings:
        raise NoMatch(f"clipped values are rounded to {element.roundings[0]}", element.origin)
    value, ends = element, (list[Element](), list[Element]())
    while value.factor == 1.0 and value.origin.target in BY_TENSORS:
        inner, *limits = _limits(value.origin)
        for limit, end in zip(limits, ends, strict=True):
            end.extend([] if limit is None else [operand(limit, value.index)])
        value = operand(inner, value.index)
    below, above = ends
    if len(below) != 1 or len(above) != 1 or not same_value(below[0].times(-1.0), above[0]):
        raise NoMatch("values are clipped to two bounds, expected plus and minus one", element.origin)
    return Clipped(value, above[0], is_high_last=_limits(element.origin)[2] is not None)


def _limits(node: Node) -> tuple[Node, Any, Any]:
    """What a call bounds, and the numbers or tensors that bound it from below and from above."""
    low, high = (None if place is None else argument(node, place) for place in PLACES[node.target])
    value, *others = args_of(node)[:2]
    if node.target in EITHER_ORDER and _reach(value) < _reach(*others):
        low, high = (None if limit is None else value for limit in (low, high))
        (value,) = others
    return value, low, high


def _reach(node: Node) -> tuple[bool, int]:
    """The number of dimensions along which a value may vary; constants come first."""
    return constant(node) is None, sum(size != 1 for size in node.meta["val"].shape)
