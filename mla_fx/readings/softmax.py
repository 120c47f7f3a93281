"""Softmax in any spelling, with or without a sink: the probabilities that enter a product, and their logits. It divides
exponentials by their sum, or subtracts the logarithm of the sum before it exponentiates."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of

from .algebra import Sum, as_sum
from .axes import Axis, Index, fresh, of_axis, shifted
from .calls import CASTS, args_of, argument
from .conditions import NOT, conditionals
from .constant import constant
from .contraction import reduced, summed
from .element import Element, element_of, operand, resolve
from .sizes import Size, plain
from .views import MOVERS, has_dim, shape_of

aten = torch.ops.aten

SOFTMAX = frozenset({aten._softmax.default, aten.softmax.int, aten._safe_softmax.default})
LOG_SOFTMAX = frozenset({aten._log_softmax.default, aten.log_softmax.int})
EXPONENTIALS: dict[Any, float] = {aten.exp.default: 1.0, aten.exp2.default: math.log(2)}
"""Each is `exp(number * x)`."""
LOGARITHMS: dict[Any, float] = {aten.log.default: 1.0, aten.log2.default: math.log(2), aten.logsumexp.default: 1.0}
"""Each, times the number, is the natural logarithm."""
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
    sink: Element | None = None
    zeroes: bool = False


@dataclass(frozen=True)
class _Columns:
    """The columns of a softmax, `whole`, and those that are read, from `start` on."""

    whole: Axis
    read: Axis
    start: Size

    def of(self, logits: Element) -> Softmax:
        logits = _without_peak(logits, self.whole)
        if self.read is self.whole:
            return Softmax(logits, self.read)
        left_out = Index(0 if self.start else self.read.size)
        keys = logits.at({self.whole: of_axis(self.read, offset=self.start)})
        return Softmax(keys, self.read, logits.at({self.whole: left_out}))


def softmax(element: Element) -> Softmax:
    """Read a softmax. Raises NoMatch if `element` is not one, or if more than one of its probabilities is dropped."""
    node = element.node
    if node.target in SOFTMAX:
        return replace(_by_operator(element), zeroes=node.target is aten._safe_softmax.default)
    if node.target is aten.where.self:
        return _guarded(element)
    if node.target is aten.div.Tensor and (exp := exponential(args_of(node)[0])) is not None:
        return _divided(element, exp)
    if node.target in EXPONENTIALS:
        return _less_logarithm(element)
    if node.target is aten.nan_to_num.default:
        raise NoMatch(NAN_REPLACED, node)
    raise NoMatch(f"expected a softmax, found {name_of(node)}", node)


def _by_operator(element: Element) -> Softmax:
    """Read PyTorch's own softmax, or its logarithm."""
    node, index = element.node, element.index
    value, given = args_of(node)[:2]
    if not has_dim(len(index), given):
        raise NoMatch(f"dimension {given} does not exist: there are {len(index)}", node)
    dim = given % len(index)
    columns = _columns(index, dim, node)
    return columns.of(operand(value, _along(index, dim, columns.whole)))


def _columns(index: tuple[Index, ...], dim: int, node: Node) -> _Columns:
    part, size = index[dim], shape_of(node)[dim]
    if size == 1:
        raise NoMatch("attention over a single key", node)
    read = shifted(part, -part.offset).axis
    if read is None or sum(read in other.axes for other in index) != 1:
        raise NoMatch("only some of the softmax's probabilities enter the product with the values", node)
    left_out = plain(size - read.size)
    if left_out == 0:
        return _Columns(read, read, 0)
    if left_out != 1 or part.offset not in (0, 1):
        raise NoMatch("only some of the softmax's probabilities enter the product with the values", node)
    whole = fresh(size).axis
    assert whole is not None, "a softmax with more than one column"
    return _Columns(whole, read, part.offset)


def _along(index: tuple[Index, ...], dim: int, axis: Axis) -> tuple[Index, ...]:
    return (*index[:dim], of_axis(axis), *index[dim + 1 :])


def exponential(value: object) -> Node | None:
    """The exp whose result is `value`, through views and casts."""
    for _ in range(6):
        if not isinstance(value, Node):
            return None
        if value.target in EXPONENTIALS:
            return value
        if value.target not in MOVERS and value.target not in CASTS:
            return None
        value = next(iter(args_of(value)), None)
    return None


def _divided(element: Element, exp: Node) -> Softmax:
    """Read `exp(x - max) / sum(exp(x - max))`."""
    node = element.node
    numerator, denominator = (operand(value, element.index) for value in args_of(node)[:2])
    if denominator.origin.target is not aten.sum.dim_IntList or numerator.origin is not exp:
        raise NoMatch(f"expected a softmax, found {name_of(node)}", node)
    summand, over = summed(denominator)
    dims = [dim for dim, part in enumerate(summand.index) if part in over]
    if summand.node is not numerator.node or len(over) != 1 or len(dims) != 1:
        raise NoMatch("the exponentials are not divided by their sum", node)
    columns = _columns(numerator.index, dims[0], exp)
    is_whole = over[0].axis is not None and over[0].axis.size == columns.whole.size
    if not is_whole or [dim for dim, part in enumerate(summand.index) if part != numerator.index[dim]] != dims:
        raise NoMatch("the exponentials are divided by the sum of others", node)
    return columns.of(exponentiated(exp, _along(numerator.index, dims[0], columns.whole), columns.whole))


def exponent(exp: Node, index: tuple[Index, ...]) -> Element:
    """What the natural exponential is of, at `index` of `exp`."""
    return operand(args_of(exp)[0], index, EXPONENTIALS[exp.target])


def exponentiated(exp: Node, index: tuple[Index, ...], keys: Axis) -> Element:
    """The logits whose exponentials, after their maximum along `keys` was subtracted, are read at `index` of `exp`.
    Raises NoMatch if anything else was subtracted."""
    inner = exponent(exp, index)
    if inner.origin.target not in (aten.sub.Tensor, aten.where.self):
        raise NoMatch("the scores are exponentiated directly, which may overflow where a softmax does not", exp)
    logits = less_peak(inner, keys)
    if logits is None:
        raise NoMatch("the value subtracted before the exponential is not the maximum of the scores", exp)
    return logits


def _without_peak(logits: Element, axis: Axis) -> Element:
    """The logits before their maximum was subtracted, which the softmax itself does again."""
    before = less_peak(logits, axis)
    return logits if before is None else before


def less_peak(raised: Element, axis: Axis) -> Element | None:
    """The logits, if `raised` is the logits minus their maximum along the softmax axis. Inductor subtracts it before or
    after a factor, depending on a condition: if both branches give the same logits, the condition does not matter."""
    node = raised.origin
    if node.target is not aten.where.self:
        return _difference(raised, axis)
    one, other = (_difference(operand(way, raised.index, raised.factor), axis) for way in args_of(node)[1:3])
    return one if one == other else None


def _difference(raised: Element, axis: Axis) -> Element | None:
    terms = difference(raised)
    if terms is None:
        return None
    if raised.factor > 1:  # the difference of equal scores stays zero, and the scores may become minus infinity
        what = f"differences of scores are multiplied by {raised.factor:.6g}"
        raise NoMatch(f"{what}, which may take the scores themselves out of range", raised.origin)
    logits, peak = terms
    return logits if is_peak(peak, logits, axis) else None


def difference(raised: Element) -> tuple[Element, Element] | None:
    """What is subtracted from what, if `raised` is a difference of two values, times a number that is not negative."""
    node = raised.origin
    if node.target is not aten.sub.Tensor or argument(node, 2, "alpha", 1) != 1 or raised.factor < 0:
        return None
    if not all(isinstance(value, Node) for value in args_of(node)[:2]):
        return None
    minuend, subtrahend = (operand(value, raised.index, raised.factor) for value in args_of(node)[:2])
    return minuend, subtrahend


@dataclass(frozen=True)
class LogOfSum:
    """The logarithm of the sum over `keys` of the exponentials of `logits`. `others` were added to it. Rows of minus
    infinity give NaN if `is_nan`, else minus infinity."""

    logits: Element
    keys: Axis
    others: tuple[Element, ...]
    is_nan: bool = False


def log_of_sum(terms: Sequence[Element], node: Node) -> LogOfSum:
    """Read a natural logarithm of a sum among terms: `logsumexp`, or `largest + log(sum(exp(logits - largest)))`.
    Raises NoMatch if there is none."""
    logs = [term for term in terms if term.origin.target in LOGARITHMS]
    others = [term for term in terms if term not in logs]
    if len(logs) != 1:
        raise NoMatch("expected the largest score and the logarithm of a sum", node)
    log, unit = logs[0].origin, LOGARITHMS[logs[0].origin.target]
    if logs[0].factor != unit:
        raise NoMatch(f"the logarithm of the sum is multiplied by a number, {logs[0].factor / unit:.6g}", node)
    if log.target is aten.logsumexp.default:
        source, where, over = reduced(log, logs[0].index)
        return LogOfSum(resolve(source, where), _one(over, node), tuple(others))
    total = operand(args_of(log)[0], logs[0].index)
    if total.origin.target is not aten.sum.dim_IntList:
        raise NoMatch(f"expected the logarithm of a sum, found one of {name_of(total.origin)}", node)
    exponentials, over = summed(total)
    keys = _one(over, node)
    if exponentials.node.target not in EXPONENTIALS:
        raise NoMatch(f"expected a sum of exponentials, found one of {name_of(exponentials.origin)}", node)
    raised = exponent(exponentials.node, exponentials.index)
    logits = less_peak(raised, keys)
    peaks = [] if logits is None else [term for term in others if is_peak(term, logits, keys)]
    if logits is None or len(peaks) != 1:
        raise NoMatch("the value beside the logarithm is not the maximum of the scores", node)
    left = tuple(term for term in others if term not in peaks)
    return LogOfSum(logits, keys, left, is_nan=not is_peak_guarded(raised))


def _one(over: tuple[Index, ...], node: Node) -> Axis:
    axis = over[0].axis if len(over) == 1 else None
    if axis is None:
        raise NoMatch("the exponentials are not summed over the keys alone", node)
    return axis


def subtracts_logarithm(exp: Node) -> bool:
    """Whether this exponentiates a difference from a logarithm, or the logarithm of a softmax."""
    total = attempt(as_sum, element_of(args_of(exp)[0]))
    return total is not None and any(
        term.origin.target in LOG_SOFTMAX or (term.origin.target in LOGARITHMS and term.factor < 0)
        for term in total.terms
    )


def _less_logarithm(element: Element) -> Softmax:
    """Read `exp(x - log(sum(exp(x))))`, or `exp(log_softmax(x))`."""
    node, inner = element.node, exponent(element.node, element.index)
    if inner.origin.target in LOG_SOFTMAX:
        return _by_operator(inner)
    total = as_sum(inner)
    subtracted = log_of_sum([term.times(-1.0) for term in total.terms], node)
    left = [term.times(-1.0) for term in subtracted.others]
    for dim, size in enumerate(shape_of(node)):
        if size != subtracted.keys.size:
            continue
        columns = _columns(element.index, dim, node)
        logits = subtracted.logits.at({subtracted.keys: of_axis(columns.read)})
        if columns.read is columns.whole and as_sum(logits) == Sum(tuple(left), total.constant):
            return Softmax(logits, columns.read)
    raise NoMatch("the logarithm that is subtracted from the scores is not of the sum of their exponentials", node)


def is_peak(peak: Element, logits: Element, axis: Axis) -> bool:
    """Whether `peak` is the maximum of the logits along the softmax axis; any other number may take them out of
    range."""
    factor, peak = _unguarded(peak).apart()
    largest = largest_of(peak.node)
    if largest is None:
        return False
    source, along = _reduced_along(largest, peak.index, axis)
    return source is not None and operand(source, along, factor) == logits


def _reduced_along(node: Node, index: tuple[Index, ...], axis: Axis) -> tuple[Node | None, tuple[Index, ...]]:
    """The operand of a reduction, read along `axis`, if it reduces as many elements as that axis counts."""
    source, index, over = reduced(node, index)
    if len(over) != 1 or over[0].axis is None or over[0].axis.size != axis.size:
        return None, index
    return source, tuple(of_axis(axis) if part == over[0] else part for part in index)


def _unguarded(peak: Element) -> Element:
    """The maximum, if this is zero where that is infinite, as in `logsumexp`, or minus infinity: a row that sees no key
    then has minus infinity for its logarithm, and still NaN for its probabilities."""
    guard = guarded(peak.origin)
    if guard is None or guard[1] != 0:
        return peak
    condition, _, largest = guard
    tested, kept = operand(condition, peak.index), operand(largest, peak.index)
    return kept.times(peak.factor) if _tests_for_infinity(tested, kept) else peak


def is_peak_guarded(raised: Element) -> bool:
    """Whether the maximum that was subtracted is a number in rows of minus infinity, too."""
    node = raised.origin
    if node.target is not aten.sub.Tensor:
        return False
    peak = operand(args_of(node)[1], raised.index)
    return _unguarded(peak) != peak


def guarded(node: Node) -> tuple[Node, float | None, Node] | None:
    """The condition, the number where it holds, and the value where it does not, of `where` and `masked_fill`."""
    found = next((one for one in conditionals(node) if not one.keep_where), None)
    return None if found is None else (found.condition, constant(found.replaced), found.kept)


def _tests_for_infinity(tested: Element, value: Element) -> bool:
    """Whether this is `isinf(value)`, `abs(value) == inf` or `value == -inf`."""
    node = tested.node
    if node.target is aten.isinf.default:
        return operand(args_of(node)[0], tested.index) == value
    if node.target is not aten.eq.Scalar:
        return False
    one, number = operand(args_of(node)[0], tested.index), args_of(node)[1]
    if number == math.inf and one.node.target is aten.abs.default:
        return operand(args_of(one.node)[0], one.index) == value
    return number == -math.inf and one == value


def largest_of(node: Node) -> Node | None:
    """The call that computes a node's maxima."""
    if node.target is aten.amax.default:
        return node
    is_first = node.target is operator.getitem and args_of(node)[1] == 0
    return args_of(node)[0] if is_first and args_of(node)[0].target is aten.max.dim else None


def _guarded(element: Element) -> Softmax:
    """Read a softmax whose fully masked rows are zeroed, as in scaled_dot_product_attention."""
    condition, zero, probability = args_of(element.node)
    if constant(zero) != 0:
        raise NoMatch("the attention probabilities are replaced under a condition", element.node)
    found = softmax(operand(probability, element.index))
    is_guard = _tests_for_masked_rows(operand(condition, element.index), found.logits, found.axis)
    if found.sink is not None or not is_guard:
        raise NoMatch("the attention probabilities are masked after the softmax", element.node)
    return replace(found, zeroes=True)


def _tests_for_masked_rows(condition: Element, logits: Element, axis: Axis) -> bool:
    """Whether the condition is `not any(logits != -inf)` along the softmax axis."""
    if condition.node.target not in NOT:
        return False
    some = operand(args_of(condition.node)[0], condition.index)
    if some.node.target not in (aten.any.dim, aten.any.dims):
        return False
    source, along = _reduced_along(some.node, some.index, axis)
    if source is None:
        return False
    tested = operand(source, along)
    is_negated = False
    while tested.node.target in NOT:
        tested, is_negated = operand(args_of(tested.node)[0], tested.index), not is_negated
    if tested.node.target is not (aten.eq.Scalar if is_negated else aten.ne.Scalar):
        return False
    value, number = args_of(tested.node)[:2]
    return number == -math.inf and operand(value, tested.index) == logits
