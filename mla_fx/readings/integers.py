"""Integers: positions that are counted and added, and comparisons of two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import REVERSED, SUBTRACTS
from .axes import ZERO, Index, combine, shifted
from .calls import CASTS, MULTIPLIES, args_of, argument, options_of
from .constant import EXACT, constant
from .element import Element, operand
from .same_value import same_value
from .sizes import Size, at_most, plain
from .views import Place, integer, number

aten = torch.ops.aten

INTEGERS = frozenset({torch.int64, torch.int32})
IOTA, ARANGES = torch.ops.prims.iota.default, (aten.arange.start, aten.arange.start_step)
ADDS = frozenset({aten.add.Tensor, aten.add.Scalar})


@dataclass(frozen=True)
class IntegerSum:
    """`index + sum(times * element)`: a number counted along axes, plus what integer tensors hold."""

    index: Index
    elements: frozenset[tuple[Element, Size]] = frozenset()

    def plus(self, other: IntegerSum, times: Size = 1) -> IntegerSum:
        """`self + times * other`. An element that is computed twice counts as one."""
        scaled = shifted(other.index, 0, times)
        index = combine(self.index.offset + scaled.offset, [*self.index.terms, *scaled.terms])
        total = dict(self.elements)
        for element, own in other.elements:
            alike = next((known for known in total if same_value(known, element)), element)
            total[alike] = plain(total.get(alike, 0) + times * own)
        return IntegerSum(index, frozenset(item for item in total.items() if item[1] != 0))

    @property
    def is_zero(self) -> bool:
        return self == IntegerSum(ZERO)

    @property
    def is_at_most_zero(self) -> bool:
        """Whether the sum is provably not above zero, for all values of the axes."""
        reach = self.index.offset
        for digit, stride in self.index.terms:
            if not at_most(stride, 0):
                reach = plain(reach + stride * (digit.size - 1))
        return not self.elements and at_most(reach, 0) and all(map(_has_sign, self.index.terms))


def _has_sign(term: tuple[Any, Size]) -> bool:
    return at_most(term[1], 0) or at_most(0, term[1])


_Sums = dict[Place, IntegerSum]


def integer_sum(element: Element, sums: _Sums | None = None) -> IntegerSum:
    """Read an integer. Raises NoMatch if it is not one.

    Sums are followed in int64 only; for a narrower dtype only the result is known. `sums` holds earlier readings of the
    same number: in nested sums, the paths to a term double with each level."""
    sums = {} if sums is None else sums
    place = element.node, element.index
    if place not in sums:
        sums[place] = _counted(element, sums)
    return sums[place]


def _counted(element: Element, sums: _Sums) -> IntegerSum:
    node, index = element.node, element.index
    dtype = node.meta["val"].dtype
    if dtype not in INTEGERS:
        raise NoMatch(f"{name_of(node)} computes a position in {dtype}; only int64 and int32 are exact", node)
    filled = constant(node)
    if filled is not None and abs(filled) < EXACT:
        return IntegerSum(Index(int(filled)))
    steps = counted_steps(node)
    if steps is not None:
        return IntegerSum(shifted(index[0], *steps))
    if dtype == torch.int64 and (total := _summed(node, index, sums)) is not None and _stays_in_range(total):
        return total
    return IntegerSum(ZERO, frozenset({(element, 1)}))


def _stays_in_range(total: IntegerSum) -> bool:
    """Whether no term occurs so often that 64 bits may overflow."""
    factors = [total.index.offset, *(times for _, times in (*total.index.terms, *total.elements))]
    return all(not isinstance(factor, int) or abs(factor) < LARGE for factor in factors)


LARGE = 2**31  # counted numbers stay below this, too


def counted_steps(node: Node) -> tuple[Size, int] | None:
    """(start, step) of an arange of integers."""
    if node.target is aten.arange.default:
        return 0, 1
    if node.target is IOTA:
        start, step = options_of(node).get("start"), options_of(node).get("step")
    elif node.target in ARANGES:
        start, step = argument(node, 0, "start"), argument(node, 2, "step", 1)
    else:
        return None
    return (number(start), step) if _is_whole(start) and isinstance(step, int) else None


def _is_whole(value: Any) -> bool:
    fake = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(fake, (int, torch.SymInt)) and not isinstance(fake, bool)


def _summed(node: Node, index: tuple[Index, ...], sums: _Sums) -> IntegerSum | None:
    """Read a sum, a difference, or a 32-bit number in 64 bits."""
    if node.target in CASTS:
        source = args_of(node)[0]
        return integer_sum(operand(source, index), sums) if source.meta["val"].dtype in INTEGERS else None
    if node.target in MULTIPLIES:
        return _multiplied(node, index, sums)
    if node.target not in ADDS | SUBTRACTS | REVERSED or argument(node, 2, "alpha", 1) != 1:
        return None
    left, right = (_addend(value, index, sums) for value in args_of(node)[:2])
    if node.target in REVERSED:
        left, right = right, left
    return left.plus(right, 1 if node.target in ADDS else -1)


def _multiplied(node: Node, index: tuple[Index, ...], sums: _Sums) -> IntegerSum | None:
    """Read an integer times a constant."""
    value, other = args_of(node)[:2]
    if whole_number(other) is None:
        value, other = other, value
    times = whole_number(other)
    if times is None or not isinstance(value, Node):
        return None
    return IntegerSum(ZERO).plus(integer_sum(operand(value, index), sums), times)


def whole_number(value: Any) -> Size | None:
    """A number known at compile time, or a size; None if it is neither, or not an integer."""
    if _is_whole(value):
        return integer(value)
    number = constant(value)
    return int(number) if number is not None and number.is_integer() and abs(number) < EXACT else None


def _addend(value: Any, index: tuple[Index, ...], sums: _Sums) -> IntegerSum:
    if _is_whole(value):
        return IntegerSum(Index(integer(value)))
    return integer_sum(operand(value, index), sums)


# --- comparisons: what must not be above zero where one holds -----------------------------------------------------


def _up_to(left: IntegerSum, right: IntegerSum) -> IntegerSum:
    return left.plus(right, -1)


def _below(left: IntegerSum, right: IntegerSum) -> IntegerSum:
    return _up_to(left, right).plus(IntegerSum(Index(1)))


_Excess = Callable[[IntegerSum, IntegerSum], IntegerSum]
_COMPARISONS: dict[str, _Excess] = {
    "le": _up_to,
    "lt": _below,
    "ge": lambda left, right: _up_to(right, left),
    "gt": lambda left, right: _below(right, left),
}
COMPARISONS = {
    getattr(getattr(aten, name), overload): excess
    for name, excess in _COMPARISONS.items()
    for overload in ("Tensor", "Scalar")
}


def excess(comparison: Node, index: tuple[Index, ...]) -> IntegerSum:
    """A sum that is not above zero exactly where the comparison holds. Raises NoMatch if it does not compare
    integers."""
    sums: _Sums = {}
    left, right = (_addend(value, index, sums) for value in args_of(comparison)[:2])
    return COMPARISONS[comparison.target](left, right)


def opposite(found: IntegerSum) -> IntegerSum:
    """A sum that is not above zero exactly where `found` is above zero."""
    return IntegerSum(Index(1)).plus(found, -1)
