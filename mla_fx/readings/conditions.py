"""Values that depend on a condition, and conditions of conditions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .calls import args_of
from .element import Element, operand

aten = torch.ops.aten

MASKED_FILL = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})
BOTH = frozenset({aten.logical_and.default, aten.bitwise_and.Tensor, aten.mul.Tensor})
EITHER = frozenset({aten.logical_or.default, aten.bitwise_or.Tensor})


class Conditional(NamedTuple):
    """A value that is `kept` where the condition is `keep_where`, and `replaced` elsewhere. Both may be numbers."""

    condition: Node
    kept: Any
    replaced: Any
    keep_where: bool


def conditionals(node: Node) -> tuple[Conditional, ...]:
    """Both ways to read `where` and `masked_fill`, first with what is kept where the condition holds; none for other
    calls."""
    if node.target is aten.where.self:
        condition, one, other = args_of(node)
    elif node.target in MASKED_FILL:
        other, condition, one = args_of(node)
    else:
        return ()
    return Conditional(condition, one, other, True), Conditional(condition, other, one, False)


def conditions_of(condition: Element, holds: bool) -> list[tuple[Element, bool]]:
    """The conditions that a condition is made of, each with its value: all have theirs exactly where `condition` is
    `holds`. None if it is made of no others."""
    node, index = condition.node, condition.index
    if node.target in NOT:
        return [(operand(args_of(node)[0], index), not holds)]
    if node.target in (BOTH if holds else EITHER):
        return [(operand(value, index), holds) for value in args_of(node)[:2]]
    return []
