"""Sums and products of elements, whatever operations spell them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .element import Element, constant, operand
from .views import args_of, argument

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """`constant + sum(terms)`; the terms carry their signs and factors as scale."""

    terms: tuple[Element, ...]
    constant: float


@dataclass(frozen=True)
class Product:
    """`number * product(element ** power)`; the elements carry no scale."""

    factors: tuple[tuple[Element, float], ...]
    number: float


def as_sum(element: Element) -> Sum:
    """`element` as a sum of terms that are no sums themselves."""
    terms: list[Element] = []
    total = _add_up(element, terms)
    return Sum(tuple(terms), total)


_ADDS = {aten.add.Tensor: 1.0, aten.add.Scalar: 1.0, aten.sub.Tensor: -1.0, aten.sub.Scalar: -1.0}


def _add_up(element: Element, terms: list[Element]) -> float:
    node = element.node
    if node.target not in _ADDS:
        terms.append(element)
        return 0.0
    total = 0.0
    for value, sign in (
        (args_of(node)[0], 1.0),
        (args_of(node)[1], _ADDS[node.target] * float(argument(node, 2, "alpha", 1))),
    ):
        if (number := constant(value)) is not None:
            total += element.scale * sign * number
        else:
            total += _add_up(operand(value, element.index, element.scale * sign), terms)
    return total


def as_product(element: Element) -> Product:
    """`element` as a product of powers of elements that are no products themselves."""
    factors: list[tuple[Element, float]] = []
    number = _multiply_up(element, 1.0, factors)
    return Product(tuple(_collected(factors)), number)


def _collected(factors: list[tuple[Element, float]]) -> list[tuple[Element, float]]:
    """Whole powers of one element added up. Roots stay apart: x^0.5 x^0.5 is no x where x is negative."""
    whole: dict[Element, float] = {}
    roots: list[tuple[Element, float]] = []
    for factor, power in factors:
        factor = factor.settled()
        if power == int(power):
            whole[factor] = whole.get(factor, 0.0) + power
        else:
            roots.append((factor, power))
    return [*whole.items(), *roots]


_POWERS = {aten.rsqrt.default: -0.5, aten.sqrt.default: 0.5, aten.reciprocal.default: -1.0, aten.square.default: 2.0}


def _multiply_up(element: Element, power: float, factors: list[tuple[Element, float]]) -> float:
    inner = _factors(element.node)
    # (x^2)^0.5 is |x|, no power of x: an even power is taken apart only by an even one
    loses_sign = any(own == int(own) and own % 2 == 0 and (own * power) % 2 for _, own in inner)
    divides_by_zero = any(constant(value) == 0 and own * power < 0 for value, own in inner)
    if not inner or loses_sign or divides_by_zero or (element.scale < 0 and power != int(power)):
        factors.append((element.unscaled(), power))
        return abs(element.scale) ** power if element.scale > 0 else element.scale ** int(power)
    number: float = element.scale**power
    for value, own_power in inner:
        known = constant(value)
        if known is not None:
            number *= known ** (own_power * power)
        else:
            number *= _multiply_up(operand(value, element.index), own_power * power, factors)
    return number


def _factors(node: Node) -> list[tuple[Any, float]]:
    """The operands of a product and their powers; empty if `node` is none."""
    target = node.target
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        return [(args_of(node)[0], 1.0), (args_of(node)[1], 1.0)]
    if target is aten.div.Tensor and not node.kwargs:
        return [(args_of(node)[0], 1.0), (args_of(node)[1], -1.0)]
    if target in _POWERS:
        return [(args_of(node)[0], _POWERS[target])]
    if target is aten.pow.Tensor_Scalar:
        return [(args_of(node)[0], float(args_of(node)[1]))]
    if target is aten.pow.Tensor_Tensor and (exponent := constant(args_of(node)[1])) is not None:
        return [(args_of(node)[0], exponent)]
    return []
