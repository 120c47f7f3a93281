"""The largest magnitude of a value over some dimensions, in any spelling."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.axes import Index
from mla_fx.readings.bounds import bounded
from mla_fx.readings.calls import args_of, argument
from mla_fx.readings.contraction import reduced
from mla_fx.readings.element import Element, operand, operands, resolve

aten = torch.ops.aten
Largest = tuple[Element, tuple[Index, ...]]


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
