"""Values clipped to plus and minus a bound that the program computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .calls import args_of, argument
from .element import Element, operand
from .same_value import same_value

aten = torch.ops.aten
# The places of the lower and the upper bound among the arguments.
BOUNDS = {
    aten.clamp.Tensor: (1, 2),
    aten.clamp_min.Tensor: (1, None),
    aten.clamp_max.Tensor: (None, 1),
    aten.maximum.default: (1, None),
    aten.minimum.default: (None, 1),
}
EITHER_ORDER = frozenset({aten.maximum.default, aten.minimum.default})


@dataclass(frozen=True)
class Clipped:
    """`value` between `-bound` and `bound`. Where `bound` is negative, the limit that comes last counts:
    `min(max(value, -bound), bound)` is `bound`, and with `is_high_last` the program computes that."""

    value: Element
    bound: Element
    is_high_last: bool


def clipped(element: Element) -> Clipped | None:
    """Read an element as a clipped value; None if nothing bounds it. Raises NoMatch if the bounds are not plus and
    minus one value, or if it is rounded after it is clipped."""
    last = _bounded(element.origin)
    if last is None:
        return None
    if element.roundings:
        raise NoMatch(f"clipped values are rounded to {element.roundings[0]}", element.origin)
    value, below, above = element, list[Element](), list[Element]()
    while value.factor == 1.0 and (found := _bounded(value.origin)) is not None:
        inner, low, high = found
        below += [] if low is None else [operand(low, value.index)]
        above += [] if high is None else [operand(high, value.index)]
        value = operand(inner, value.index)
    if len(below) != 1 or len(above) != 1 or not same_value(below[0].times(-1.0), above[0]):
        raise NoMatch("values are clipped to two bounds, expected plus and minus one", element.origin)
    return Clipped(value, above[0], is_high_last=last[2] is not None)


def _bounded(node: Node) -> tuple[Node, Node | None, Node | None] | None:
    """What a call bounds, and the tensors that bound it from below and from above."""
    if node.target not in BOUNDS:
        return None
    low, high = (None if place is None else argument(node, place) for place in BOUNDS[node.target])
    value: Node = args_of(node)[0]
    if node.target in EITHER_ORDER and _size(value) < _size(args_of(node)[1]):
        value, other = args_of(node)[1], value
        low, high = (None if bound is None else other for bound in (low, high))
    return value, low, high


def _size(node: Node) -> int:
    """The number of dimensions along which a value may vary."""
    return sum(size != 1 for size in node.meta["val"].shape)
