"""Positions within bounds: those that are not may be replaced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from mla_fx.readings.axes import ZERO, Index
from mla_fx.readings.integers import IntegerSum
from mla_fx.readings.sizes import Size, product

from .plan import Call, Expression

aten = torch.ops.aten


def count(sizes: Sequence[Size]) -> Any:
    """The number of slots, computed from the cache's own sizes, so the graph need not know how these are computed."""
    if all(isinstance(size, int) for size in sizes):
        return product(sizes)
    return functools.reduce(lambda *both: Call(operator.mul, *both), sizes)


def proved(position: IntegerSum, slots: Size) -> tuple[bool, bool]:
    """Whether no position is negative, and whether none is beyond the end."""
    excesses = IntegerSum(ZERO).plus(position, -1), position.plus(IntegerSum(Index(slots - 1)), -1)
    start, end = (excess.is_at_most_zero for excess in excesses)
    return start, end


def counted_from_start(given: Expression, sizes: Sequence[Size]) -> Expression:
    """Positions counted from the start. In an indexed assignment, negative ones count from the end."""
    is_negative = Call(aten.lt.Scalar, given, 0)
    return Call(aten.where.self, is_negative, Call(aten.add.Tensor, given, count(sizes)), given)


def is_below(place: Expression, sizes: Sequence[Size]) -> Expression:
    return Call(aten.lt.Scalar, place, count(sizes))


def is_from_start(place: Expression) -> Expression:
    return Call(aten.ge.Scalar, place, 0)


def or_else(
    conditions: Sequence[Expression],
    given: Expression,
    other: Any,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Expression:
    """`given` where all conditions hold, and `other` elsewhere."""
    holds = functools.reduce(lambda *both: Call(aten.logical_and.default, *both), conditions)
    rest = Call(aten.full.default, [], other, dtype=dtype, device=device, pin_memory=False)
    return Call(aten.where.self, holds, given, rest)
