"""Softmax in any spelling, with or without a sink: the probabilities that enter a product, and their logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import unset_fake_temporarily

from .arithmetic import LOG_SOFTMAX, LOGARITHMS, SOFTMAX, is_step
from .axes import Axis, Index, one_axis
from .calls import args_of
from .contraction import PRODUCTS, Contraction
from .element import Element, computed_from, element_of, readers, resolve
from .points import Points
from .row_arithmetic import Rows
from .rows import MOVES, NO_SOFTMAX, NOT_LARGEST, Row, difference, is_product, source
from .same_value import equal_calls
from .views import fresh_index

aten = torch.ops.aten

LEAST_SHARE = 0.01  # of a part or a sink, from which a logit can be told
QUOTIENTS = frozenset({aten.div.Tensor, aten.mul.Tensor})
NAN_REPLACED = (
    "NaN among the attention probabilities is replaced, whatever it comes from; the operators give zeros only for rows "
    "that see no key"
)


@dataclass(frozen=True)
class Softmax:
    """Probabilities along `axis` of `logits`; `sink` is the logit of one more column, whose probability is not read.
    Rows of minus infinity give zeros if `zeroes`, else NaN."""

    logits: Element
    axis: Axis
    sink: Element | float | None = None
    zeroes: bool = False

    @classmethod
    def of(cls, row: Row, sink: Element | float | None, *, zeroes: bool) -> Softmax:
        beside = row.columns.left_out(row.logits)
        if beside is not None and sink is not None:
            raise NoMatch("a softmax has two attention sinks", row.node)
        return cls(row.columns.keys(row.logits), row.columns.read, sink if beside is None else beside, zeroes)


def softmax(element: Element, over: tuple[Index, ...]) -> Softmax:
    """Read a softmax that is multiplied by values and summed `over` its keys. Raises NoMatch if `element` is none, or
    if more than one of its probabilities is dropped."""
    node = element.node
    if node.target in SOFTMAX:
        row = Row.of(element, over)
        if not row.less:
            return Softmax.of(row, None, zeroes=node.target is aten._safe_softmax.default)
    keys = one_axis(over)
    if keys is None:
        raise NoMatch("the values are not summed over the softmax axis alone", node)
    return _evaluated(element, Rows(end=node, keys=keys))


def divided_late(quotient: Node) -> tuple[tuple[Index, ...], Contraction, Softmax]:
    """Where a quotient is read, the product of exponentials and values that it divides, and their softmax. Raises
    NoMatch if the product is not divided by the sum of a row."""
    index = fresh_index(quotient)
    read = Rows(end=quotient)
    found = _evaluated(resolve(quotient, index), read)
    return index, read.products[0], found


def _evaluated(element: Element, read: Rows) -> Softmax:
    """Compare a share, or attention, with what is computed from the exponentials. Raises NoMatch if they differ."""
    node, place = element.origin, read.read(element)
    outs, lses = read.outs, [*read.lses.values()]
    sinks = [leaf for leaf in read.leaves if leaf not in outs + lses]
    if len(outs) != 1 or len(lses) != 1 or len(sinks) > 1:
        raise NoMatch(NO_SOFTMAX, node)
    leaves = *outs, *lses, *sinks, *read.free
    with unset_fake_temporarily():
        drawn = read.points(1, 1 + len(sinks), leaves)
        cases = drawn.and_where({"out": torch.nan}, {"out": torch.inf}, {"out": 0.0, "lse": -torch.inf})
        found, *unknown, blind = read.value(place, cases, leaves).chunk(4)
        sink: Element | float | None = read.leaves[sinks[0]] if sinks else None
        if sink is None and (number := _number_beside(found, drawn)) is not None:
            drawn, sink = drawn.with_sink(number), number
        if not read.is_close(found, drawn.shared(drawn.outs), drawn):
            raise NoMatch(_why_not(read, found, drawn), node)
        if any(value[drawn.shares[0] > 0].isfinite().any() for value in unknown):
            raise NoMatch(NAN_REPLACED, node)
        if not blind.isnan().all() and (blind != 0).any():
            raise NoMatch("rows that see no key are neither zero nor NaN", node)
        is_nan = bool(blind.isnan().all())
    return Softmax.of(read.rows[0], sink, zeroes=not is_nan)


def _number_beside(found: Tensor, drawn: Points) -> float | None:
    """The logit of one more column, if that is a number: the sum is larger by its exponential."""
    shares = found / drawn.outs[0]
    is_partial = (shares > LEAST_SHARE) & (shares < 1 - LEAST_SHARE) & (drawn.shares[0] == 1)
    logits = (drawn.lses[0] + (1 / shares - 1).log())[is_partial]
    return logits.median().item() if len(logits) else None


def _why_not(read: Rows, found: Tensor, drawn: Points) -> str:
    """Exponentials are out of range where something other than the largest score is subtracted; the rest may agree."""
    if read.rows[0].are_shares:
        return f"expected a softmax, found {name_of(read.end)}"
    for points in (drawn, drawn.where(range(1, drawn.logarithms), lse=-torch.inf)):
        expected = points.shared(points.outs)
        if read.is_close(torch.where(found.isfinite(), found, expected), expected, points):
            return NOT_LARGEST
    return NO_SOFTMAX


def is_softmax(exp: Node) -> bool:
    """Whether an exponential is divided, at once or behind a product with values, or less a logarithm."""
    early = (divisor for user in readers(exp, MOVES) for divisor in _divisors(user, exp))
    is_early = any(not isinstance(divisor, Node) or _is_of(divisor, exp) for divisor in early)
    return is_early or _subtracts_logarithm(exp) or division(exp) is not None


def division(exp: Node) -> tuple[Node, Node] | None:
    """A product of an exponential and values, and its quotient by what is computed from the exponential."""
    for product in filter(is_product, readers(exp, MOVES | {aten.mul.Tensor})):
        for user in readers(product, MOVES):
            if any(isinstance(divisor, Node) and _is_of(divisor, exp) for divisor in _divisors(user, product)):
                return product, user
    return None


def _divisors(user: Node, value: Node) -> Iterator[object]:
    """What a call divides a value by, or multiplies it by."""
    if user.target not in QUOTIENTS:
        return
    one, other = args_of(user)[:2]
    if isinstance(one, Node) and source(one) is value:
        yield other
    if user.target is aten.mul.Tensor and isinstance(other, Node) and source(other) is value:
        yield one


def _is_of(divisor: Node, exp: Node) -> bool:
    """Whether something is computed from an exponential, or from an equal one."""
    return any(equal_calls(node, exp) for node in computed_from(divisor, lambda node: node.target in PRODUCTS))


def _subtracts_logarithm(exp: Node) -> bool:
    power = computed_from(args_of(exp)[0], lambda node: not is_step(node) and node.target not in MOVES)
    if any(node.target in LOG_SOFTMAX for node in power):
        return True
    try:
        found = difference(element_of(args_of(exp)[0]))
    except NoMatch:  # of a difference that is multiplied
        return True
    terms = () if found is None else (term.origin for way in found[1] for term in way)
    return any(node.target in LOGARITHMS for term in terms for node in computed_from(term, is_product))
