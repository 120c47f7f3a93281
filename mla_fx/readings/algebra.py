"""Sums and products of elements in any spelling; the result contains every factor on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .calls import CASTS, args_of, argument, options_of
from .constant import constant
from .element import Element, operand

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """`constant + sum(terms)`; the terms carry their signs and factors."""

    terms: tuple[Element, ...]
    constant: float


@dataclass(frozen=True)
class Product:
    """`number * product(element ** power)`; the elements carry no factor."""

    factors: tuple[tuple[Element, float], ...]
    number: float


MOST_OPERATIONS = 100  # read in one sum or product: nested sums double with each level, and MLA has few terms
Budget = Iterator[int]


def allowance() -> Budget:
    """How much may be read in all of a value with nested sums."""
    return iter(range(MOST_OPERATIONS))


def as_sum(element: Element, budget: Budget | None = None) -> Sum:
    """Read `element` as a sum of terms that are not sums themselves. Raises NoMatch if it is too long."""
    terms: list[Element] = []
    total = _add_up(element, terms, budget or allowance())
    return Sum(tuple(terms), total)


def spend(budget: Budget, node: Node) -> None:
    """Raise NoMatch once the budget is used up, and at every call after that."""
    if next(budget, None) is None:
        raise NoMatch(f"a sum or product of more than {MOST_OPERATIONS} operations", node)


SUBTRACTS = frozenset({aten.sub.Tensor, aten.sub.Scalar})
REVERSED = frozenset({aten.rsub.Tensor, aten.rsub.Scalar})  # the second operand minus the first
_ADDS = frozenset({aten.add.Tensor, aten.add.Scalar, *SUBTRACTS, *REVERSED})


def _add_up(element: Element, terms: list[Element], budget: Budget) -> float:
    spend(budget, element.origin)
    found = addends(element)
    if found is None:
        terms.append(element)
        return 0.0
    return found.constant + sum(_add_up(term, terms, budget) for term in found.terms)


def addends(element: Element) -> Sum | None:
    """What one call adds, which may be sums again; None if it adds nothing."""
    node = element.origin
    if not _adds_numbers(node) or complemented(element) is not None:
        return None
    alpha = constant(argument(node, 2, "alpha", 1)) or 0.0
    signs = (-alpha, 1.0) if node.target in REVERSED else (1.0, -alpha if node.target in SUBTRACTS else alpha)
    terms, total = list[Element](), 0.0
    for value, sign in zip(args_of(node)[:2], signs, strict=True):
        number = constant(value)
        if number is None:
            terms.append(operand(value, element.index, element.factor * sign))
        else:
            total += element.factor * sign * number
    return Sum(tuple(terms), total)


def complemented(element: Element) -> Element | None:
    """Return the condition in `1 - condition`, which is not a sum of numbers but the opposite condition."""
    node = element.origin
    if node.target not in SUBTRACTS | REVERSED or argument(node, 2, "alpha", 1) != 1:
        return None
    one, value = args_of(node)[:2] if node.target in SUBTRACTS else args_of(node)[1::-1]
    if constant(one) != 1 or not isinstance(value, Node):
        return None
    found = operand(value, element.index)
    is_condition = found.origin.target in CASTS and args_of(found.origin)[0].meta["val"].dtype == torch.bool
    return found if is_condition else None


def _adds_numbers(node: Node) -> bool:
    """A sum or difference of floating tensors, or of a tensor and a number; flags and integers are not terms of it."""
    if node.target not in _ADDS or not constant(argument(node, 2, "alpha", 1)):
        return False
    terms = [node, *(value for value in args_of(node)[:2] if isinstance(value, Node) and constant(value) is None)]
    values = [term.meta["val"] for term in terms]
    return all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def as_product(element: Element, kept: Node | None = None) -> Product:
    """Read `element` as a product of powers of elements that are not products themselves, or that `kept` accepts."""
    factors: list[tuple[Element, float]] = []
    number = _multiply_up(element, 1.0, factors, allowance(), kept)
    return Product(tuple(_collected(factors)), number)


def _collected(factors: list[tuple[Element, float]]) -> list[tuple[Element, float]]:
    """Add up whole powers of one element. Roots stay separate: x^0.5 x^0.5 is not x if x is negative."""
    whole: dict[Element, float] = {}
    roots: list[tuple[Element, float]] = []
    for factor, power in factors:
        if power == int(power):
            whole[factor] = whole.get(factor, 0.0) + power
        else:
            roots.append((factor, power))
    return [*whole.items(), *roots]


_POWERS = {aten.rsqrt.default: -0.5, aten.sqrt.default: 0.5, aten.reciprocal.default: -1.0, aten.square.default: 2.0}


def _multiply_up(
    element: Element, power: float, factors: list[tuple[Element, float]], budget: Budget, kept: Node | None
) -> float:
    number, element = element.apart()
    spend(budget, element.node)
    inner = [] if element.node is kept else _factors(element.node)
    # (x^2)^0.5 is |x|, not a power of x: only an even power may be applied to an even power
    loses_sign = any(own == int(own) and own % 2 == 0 and (own * power) % 2 for _, own in inner)
    divides_by_zero = any(constant(value) == 0 and own * power < 0 for value, own in inner)
    number = _power(number, power, element.node)
    if not inner or loses_sign or divides_by_zero:
        factors.append((element, power))
        return number
    for value, own_power in inner:
        known = constant(value)
        if known is not None:
            number *= _power(known, own_power * power, element.node)
        else:
            number *= _multiply_up(operand(value, element.index), own_power * power, factors, budget, kept)
    return number


def _power(number: float, power: float, node: Node) -> float:
    try:
        result = number**power  # complex for the root of a negative number
    except (OverflowError, ZeroDivisionError):
        result = math.inf
    if not isinstance(result, float) or not math.isfinite(result):
        raise NoMatch(f"{number:.6g} to the power {power:.6g} is not a number", node)
    return result


def _factors(node: Node) -> list[tuple[Any, float]]:
    """The operands of a product and their powers; empty if `node` is not a product, or one of integers."""
    if not node.meta["val"].dtype.is_floating_point:
        return []
    target = node.target
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        return [(args_of(node)[0], 1.0), (args_of(node)[1], 1.0)]
    if target is aten.div.Tensor and not options_of(node):
        return [(args_of(node)[0], 1.0), (args_of(node)[1], -1.0)]
    if target in _POWERS:
        return [(args_of(node)[0], _POWERS[target])]
    if target is aten.pow.Tensor_Scalar and (exponent := constant(args_of(node)[1])) is not None:
        return [(args_of(node)[0], exponent)]
    if target is aten.pow.Tensor_Tensor and (exponent := constant(args_of(node)[1])) is not None:
        return [(args_of(node)[0], exponent)]
    return []
