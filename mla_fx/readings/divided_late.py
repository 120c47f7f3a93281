"""Attention that is divided by the sum of a row at its end: `(exp(x - max) @ value) / sum(exp(x - max))`."""

from __future__ import annotations

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import Index
from .calls import CASTS, args_of
from .conditions import MASKED_FILL
from .constant import constant
from .contraction import PRODUCTS, Contraction, contraction, summed
from .element import Element, first_reader, operand
from .softmax import (
    EXPONENTIALS,
    Softmax,
    exponent,
    exponential,
    exponentiated,
    guarded,
    is_peak_guarded,
)
from .views import MOVERS, fresh_index

aten = torch.ops.aten

SUMS = PRODUCTS | {aten.sum.dim_IntList}
RAISES = frozenset({aten.clamp.default, aten.clamp_min.default})
STEPS = frozenset({*SUMS, *MOVERS, *CASTS, *RAISES, *MASKED_FILL, aten.where.self})


def division(exp: Node) -> Node | None:
    """The quotient of a product and of a sum, each computed from an exponential, if this is one that is divided so."""
    if exp.target not in EXPONENTIALS:
        return None
    quotient = first_reader(exp, {aten.div.Tensor}, STEPS)
    if quotient is None or not isinstance(args_of(quotient)[1], Node) or exponential(args_of(quotient)[0]) is exp:
        return None
    total = _unguarded(operand(args_of(quotient)[1], fresh_index(quotient)))
    if total.origin.target is not aten.sum.dim_IntList or total.factor != 1.0:
        return None
    summand, _ = summed(total)
    return quotient if summand.origin is exp and summand.factor == 1.0 else None


def divided_late(quotient: Node, exp: Node) -> tuple[tuple[Index, ...], Contraction, Softmax]:
    """Where the quotient is read, the product with the values, and the softmax. Raises NoMatch if there is none."""
    index = fresh_index(quotient)
    numerator, divisor = (operand(value, index) for value in args_of(quotient)[:2])
    total = _unguarded(divisor)
    weighted = contraction(numerator)
    weights = weighted.left if weighted.left.origin is exp else weighted.right
    summand, over = summed(total)
    keys = weighted.over[0].axis if len(weighted.over) == 1 else None
    if weights.origin is not exp or keys is None or len(over) != 1 or over[0].axis is None:
        raise NoMatch("the exponentials are not summed over the keys alone", quotient)
    if over[0].axis.size != keys.size or summand.renamed({over[0].axis: weighted.over[0]}).index != weights.index:
        raise NoMatch("the values are divided by the sum of other exponentials", quotient)
    zeroes = total != divisor and is_peak_guarded(exponent(exp, weights.index))
    return index, weighted, Softmax(exponentiated(exp, weights.index, keys), keys, zeroes=zeroes)


def _unguarded(total: Element) -> Element:
    """The sum of a row, if this is at least a number up to 1, or that number instead of zero. A sum is 1 or more, for
    it has the largest score's exponential, or it is zero, and then so is what it divides."""
    node = total.origin
    if total.factor != 1.0:
        return total
    if node.target in RAISES:
        value, least, *most = args_of(node)
        return operand(value, total.index) if most in ([], [None]) and _is_small(constant(least)) else total
    guard = guarded(node)
    if guard is None or not _is_small(guard[1]):
        return total
    tested, found = operand(guard[0], total.index).origin, operand(guard[2], total.index)
    is_guard = tested.target is aten.eq.Scalar and args_of(tested)[1] == 0
    return found if is_guard and operand(args_of(tested)[0], total.index) == found else total


def _is_small(number: float | None) -> bool:
    return number is not None and 0 < number <= 1
