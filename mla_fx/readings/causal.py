"""Causal masks. By position: row s of a sequence attends to the keys up to `position + s`, and to no others. By length:
the last row attends to that many keys, and each row before it to one less.

The masks of an attention are split into comparisons of integers. All of them hold where a key is seen. Those that
hold everywhere are dropped. Exactly one comparison may remain, of a key's number with a position and a row's number.
Anything else is refused, and stays a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of
from mla_fx.readings.integers import COMPARISONS, IntegerSum, excess, opposite

from .algebra import complemented
from .axes import Axis, Index, composite, shifted, subtract
from .calls import CASTS, args_of, argument
from .conditions import conditionals, conditions_of
from .constant import FILLED, FILLS, constant, rounded
from .element import Element, operand
from .logits import Mask, Masked
from .sizes import Size, at_most, plain, product
from .views import integer

aten = torch.ops.aten

TRIANGLES = frozenset({aten.tril.default, aten.triu.default})
NUMBERS = {**FILLS, aten.new_full.default: 2}
MOST_CONDITIONS = 50  # read in one mask: masks that share conditions double with each level


@dataclass(frozen=True)
class CausalByPosition:
    """The last row sees `position + more` keys, and each row before it one less; the scores of the others are `fill`,
    or minus infinity if that is None.

    `position` is an element of integers, one per sequence or one for all, or a number. Either it is the position of the
    first row and `more` the number of rows, or it is the number of keys and `more` is 0."""

    position: Element | Size
    more: Size
    fill: float | None


def causal_by_position(found: Masked, sequences: tuple[Axis, ...], rows: tuple[Axis, ...]) -> CausalByPosition:
    """Read what all masks of scores hide together; its rows are counted along the axes `rows`, slowest first.

    Raises NoMatch unless they provably hide exactly the keys after a position."""
    hiding = [(mask, left) for mask in found.masks if (left := _left(_conditions(mask)))]
    if len(hiding) != 1:
        raise NoMatch(f"{len(hiding)} masks hide keys by position, expected one", found.node)
    mask, conditions = hiding[0]
    if len(conditions) != 1:
        raise NoMatch("the mask hides more than the keys after a position", mask.node)
    position, more = _position(conditions.pop(), found.keys, rows, mask.node)
    if isinstance(position, Element) and not position.axes <= set(sequences):
        raise NoMatch("the positions of rows or heads are not provably consecutive", position.origin)
    if not isinstance(position, Element) and not at_most(0, position):
        raise NoMatch(f"the mask counts from position {position}, and the keys count from 0", mask.node)
    number = _added(mask.element)[0] if mask.fill is None else mask.fill
    _check_lowest(number, mask)
    return CausalByPosition(position, more, None if number == -math.inf else number)


def may_hide(mask: Mask) -> bool:
    """Whether a mask hides keys, as far as that is known."""
    conditions = attempt(_conditions, mask)
    return conditions is None or bool(_left(conditions))


def _left(conditions: Iterable[IntegerSum]) -> set[IntegerSum]:
    return {condition for condition in conditions if not condition.is_at_most_zero}


def _position(condition: IntegerSum, keys: Index, rows: tuple[Axis, ...], node: Node) -> tuple[Element | Size, Size]:
    """`p` of the condition `key - row - p <= 0`, and how many more keys the last row sees."""
    steps = product(axis.size for axis in rows)
    keys_behind_rows = IntegerSum(keys).plus(IntegerSum(composite(rows)), -1)
    rest = subtract(condition.index, keys_behind_rows.index)
    if rest is None or rest.terms:
        raise NoMatch("the mask compares something else than a key's position with a row's", node)
    if not condition.elements:
        return plain(-rest.offset), steps
    (element, times), *others = condition.elements
    if others or times != -1:
        raise NoMatch("the mask compares keys with more than one position per row", node)
    # a row that sees more or fewer keys than its own position allows does not belong to a length of the cache
    if rest.offset not in (0, steps):
        raise NoMatch(f"the mask hides keys from position + {1 - rest.offset} on, expected position + 1", node)
    return element, plain(steps - rest.offset)


def _check_lowest(number: float, mask: Mask) -> None:
    """Next to the lowest number, no probability remains and no score changes it. In float16 a score may."""
    if number == -math.inf:
        return
    is_added = mask.fill is None
    dtype = mask.element.dtype if is_added else mask.node.meta["val"].dtype
    if number != torch.finfo(dtype).min or (is_added and dtype == torch.float16):
        raise NoMatch(f"scores are masked with {number:.6g}, which is not the lowest number of {dtype}", mask.node)


def _conditions(mask: Mask) -> list[IntegerSum]:
    if mask.fill is None:
        return _added(mask.element)[1]
    return _conjuncts(mask.element, mask.keep_where)


# --- numbers that are added ---------------------------------------------------------------------------------------


def _added(element: Element) -> tuple[float, list[IntegerSum]]:
    """Read a value that is zero where all of some conditions hold, and the number elsewhere. Raises NoMatch for
    others."""
    factor, inner = element.apart()
    if factor != 1.0 and element.roundings:
        raise NoMatch("a mask is multiplied by a number and rounded", element.origin)
    number, conditions = _zero_or(inner)
    for dtype in (inner.node.meta["val"].dtype, *reversed(element.roundings)):
        number = rounded(number, dtype)
    return rounded(number * factor, element.dtype), conditions


def _zero_or(element: Element) -> tuple[float, list[IntegerSum]]:
    node, index = element.node, element.index
    if node.target is aten.triu.default:
        return _above(node, index)
    ways = conditionals(node)
    if not ways:
        return 1.0, _flag(element)
    for condition, kept, replaced, keep_where in ways:
        if constant(kept) == 0 and (number := constant(replaced)) is not None:
            return number, _conjuncts(operand(condition, index), keep_where)
    raise NoMatch(f"{name_of(node)} adds neither zero nor one fixed number to the scores", node)


def _above(node: Node, index: tuple[Index, ...]) -> tuple[float, list[IntegerSum]]:
    """`full(number).triu()`."""
    number = constant(args_of(node)[0])
    if number is None:
        raise NoMatch("a mask has more than one number above its diagonal", node)
    return number, [opposite(_in_triangle(node, index))]


def _flag(element: Element, is_one: bool = True) -> list[IntegerSum]:
    """The conditions that hold where a condition as a number, or one minus that number, is zero."""
    node, index = element.node, element.index
    if node.target in CASTS:
        return _conjuncts(operand(args_of(node)[0], index), not is_one)
    complement = complemented(element)
    if complement is None:
        raise NoMatch(f"{name_of(node)} is added to the scores, and is not provably zero or one fixed number", node)
    return _flag(complement, not is_one)


# --- conditions ---------------------------------------------------------------------------------------------------


def _conjuncts(condition: Element, holds: bool) -> list[IntegerSum]:
    """Sums that are all at most zero exactly where the condition equals `holds`. Raises NoMatch if unknown."""
    pending, found = [(condition, holds)], list[IntegerSum]()
    for _ in range(MOST_CONDITIONS):
        if not pending:
            return found
        element, holds = pending.pop()
        more, compared = _taken_apart(element, holds)
        pending += more
        found += compared
    raise NoMatch(f"a mask of more than {MOST_CONDITIONS} conditions", condition.origin)


def _taken_apart(element: Element, holds: bool) -> tuple[list[tuple[Element, bool]], list[IntegerSum]]:
    """The conditions in a condition, and the operands that it compares."""
    node, index = element.node, element.index
    if node.meta["val"].dtype != torch.bool:
        raise NoMatch(f"{name_of(node)} gives {node.meta['val'].dtype}, expected a condition", node)
    if parts := conditions_of(element, holds):
        return parts, []
    if node.target in COMPARISONS:
        compared = excess(node, index)
        return [], [compared if holds else opposite(compared)]
    if node.target in TRIANGLES and holds:
        return [(operand(args_of(node)[0], index), True)], [_in_triangle(node, index)]
    if node.target in TRIANGLES and always(args_of(node)[0]) is True:
        return [], [opposite(_in_triangle(node, index))]
    if always(node) is holds:
        return [], []
    raise NoMatch(f"{name_of(node)} does not compare positions", node)


def _in_triangle(node: Node, index: tuple[Index, ...]) -> IntegerSum:
    """A sum that is not above zero where a triangle keeps its operand: `column <= row + diagonal`, or from there on."""
    diagonal = integer(argument(node, 1, "diagonal", 0))
    row, column = IntegerSum(index[-2]), IntegerSum(shifted(index[-1], -diagonal))
    upper_left, lower_right = (column, row) if node.target is aten.tril.default else (row, column)
    return upper_left.plus(lower_right, -1)


def always(node: Node) -> bool | None:
    """The value of a condition that is the same everywhere."""
    if node.target in FILLED:
        return bool(FILLED[node.target])
    number = argument(node, NUMBERS[node.target]) if node.target in NUMBERS else None
    return bool(number) if isinstance(number, (bool, int)) else None
