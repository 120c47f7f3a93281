"""Rows of attention scores: their exponentials, read at all columns or all but one, and what is summed of these."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import SUBTRACTS, addends
from .arithmetic import EXPONENTIALS, LOG_SOFTMAX, SOFTMAX
from .axes import Axis, Index, of_axis, one_axis, shifted
from .calls import CASTS, args_of, operands_of
from .contraction import SUMS, Contraction, contraction, summed
from .element import Element, computed_from, operand
from .sizes import Size, plain
from .views import MOVERS, has_dim, shape_of

aten = torch.ops.aten

MOVES = frozenset({*MOVERS, *CASTS})
DIFFERENCES = SUBTRACTS | {aten.where.self}
SOME = "only some of the softmax's probabilities enter the product with the values"
OVER_OTHERS = "the exponentials are not summed over the keys alone"
DIRECT = "the scores are exponentiated directly, which may overflow where a softmax does not"
NOT_LARGEST = "the value subtracted before the exponential is not the maximum of the scores"
NO_SOFTMAX = "the exponentials of scores are not divided by their sum"


@dataclass(frozen=True)
class Columns:
    """The columns of a row, `whole`, and those that are read, from `start` on: all, or all but the first or last."""

    whole: Axis
    read: Axis
    start: Size

    @classmethod
    def of(cls, index: tuple[Index, ...], dim: int, node: Node) -> Columns:
        part, size = index[dim], shape_of(node)[dim]
        if size == 1:
            raise NoMatch("attention over a single key", node)
        read = shifted(part, -part.offset).axis
        if read is None or sum(read in other.axes for other in index) != 1:
            raise NoMatch(SOME, node)
        left_out = plain(size - read.size)
        if left_out == 0:
            return cls(read, read, 0)
        if left_out != 1 or part.offset not in (0, 1):
            raise NoMatch(SOME, node)
        return cls(Axis(size), read, part.offset)

    def keys(self, logits: Element) -> Element:
        return logits if self.read is self.whole else logits.at({self.whole: of_axis(self.read, offset=self.start)})

    def left_out(self, logits: Element) -> Element | None:
        """The logit of the column that is not read."""
        return None if self.read is self.whole else logits.at({self.whole: Index(0 if self.start else self.read.size)})


Ways = tuple[tuple[Element, ...], ...]
"""Numbers that are added up; a condition chooses between two such sums."""


@dataclass(frozen=True)
class Row:
    """`exp(logits - less)` at some columns of a row or, if these are shares, a softmax of `logits - less`. `less` are
    the numbers of the row that were subtracted, one after the other."""

    node: Node
    columns: Columns
    logits: Element
    less: tuple[Ways, ...]
    are_shares: bool

    @classmethod
    def of(cls, weights: Element, over: tuple[Index, ...]) -> Row:
        """Raises NoMatch if these are no exponentials along the keys, which are summed over."""
        node, keys = weights.origin, one_axis(over)
        dims = [dim for dim, part in enumerate(weights.index) if keys in part.axes]
        if keys is None or len(dims) != 1:
            raise NoMatch(OVER_OTHERS, node)
        columns = Columns.of(weights.index, dims[0], node)
        index = (*weights.index[: dims[0]], of_axis(columns.whole), *weights.index[dims[0] + 1 :])
        raised, are_shares = _raised(node, index, columns.whole)
        logits, less = apart(raised, columns.whole)
        if not are_shares and not less:
            raise NoMatch(NOT_LARGEST if raised.origin.target in DIFFERENCES else DIRECT, node)
        return cls(node, columns, logits, less, are_shares)


def _raised(node: Node, index: tuple[Index, ...], whole: Axis) -> tuple[Element, bool]:
    """What is exponentiated at `index` of a node, and whether the result is divided by its sum at once."""
    if node.target in SOFTMAX:
        return _normalised(node, index, whole), True
    if node.target not in EXPONENTIALS:
        raise NoMatch(f"expected a softmax, found {name_of(node)}", node)
    raised = operand(args_of(node)[0], index, EXPONENTIALS[node.target])
    is_normalised = raised.origin.target in LOG_SOFTMAX
    return _normalised(raised.node, raised.index, whole) if is_normalised else raised, is_normalised


def _normalised(node: Node, index: tuple[Index, ...], whole: Axis) -> Element:
    """What PyTorch's own softmax, or its logarithm, is of."""
    value, dim = args_of(node)[:2]
    if not has_dim(len(index), dim):
        raise NoMatch(f"dimension {dim} does not exist: there are {len(index)}", node)
    if index[dim].axis is not whole:
        raise NoMatch("the values are not summed over the softmax axis alone", node)
    return operand(value, index)


def apart(raised: Element, keys: Axis) -> tuple[Element, tuple[Ways, ...]]:
    """Logits along the keys, and the numbers of their row that are subtracted."""
    less: list[Ways] = []
    while (found := difference(raised, keys)) is not None:
        raised, ways = found
        less.append(ways)
    return raised, tuple(less)


def difference(raised: Element, keys: Axis | None = None) -> tuple[Element, Ways] | None:
    """What remains of a power without numbers of its row. Inductor subtracts the largest before or after a factor,
    depending on a condition: the rest is the same."""
    if raised.origin.target is not aten.where.self:
        return _without_numbers(raised, keys)
    ways = (operand(way, raised.index, raised.factor) for way in args_of(raised.origin)[1:3])
    one, other = (_without_numbers(way, keys) for way in ways)
    return None if one is None or other is None or one[0] != other[0] else (one[0], one[1] + other[1])


def _without_numbers(raised: Element, keys: Axis | None) -> tuple[Element, Ways] | None:
    total = addends(raised) if any(map(_is_reduced, operands_of(raised.origin))) else None
    if total is None or total.constant:
        return None
    of_row = [term for term in total.terms if _is_of_row(term, raised, keys)]
    rest = [term for term in total.terms if term not in of_row]
    if len(rest) != 1 or not of_row:
        return None
    if abs(raised.factor) > 1:  # the difference of equal scores stays zero, and the scores may become minus infinity
        what = f"differences of scores are multiplied by {raised.factor:.6g}"
        raise NoMatch(f"{what}, which may take the scores themselves out of range", raised.origin)
    return rest[0], (tuple(term.times(-1.0) for term in of_row),)


def _is_of_row(term: Element, raised: Element, keys: Axis | None) -> bool:
    """Whether a term is one number of a row, computed from a sum of exponentials or a maximum of its scores."""
    return keys not in term.axes and term.axes < raised.axes and _is_reduced(term.origin)


def _is_reduced(value: Node) -> bool:
    found = () if is_product(value) else computed_from(value, is_product)
    return any(node.target is aten.logsumexp.default or largest_of(node) or is_total(node) for node in found)


def largest_of(node: Node) -> Node | None:
    """The call that computes a node's maxima."""
    if node.target is aten.amax.default:
        return node
    is_first = node.target is operator.getitem and args_of(node)[1] == 0
    return args_of(node)[0] if is_first and args_of(node)[0].target is aten.max.dim else None


def is_total(node: Node) -> bool:
    """Whether a value is a sum of exponentials."""
    return node.target is aten.sum.dim_IntList and source(args_of(node)[0]).target in EXPONENTIALS


def is_product(node: Node) -> bool:
    return node.target in SUMS and not is_total(node)


def source(value: Node) -> Node:
    """The call that computes a value, behind views, casts and numbers that multiply it."""
    while value.target in MOVES or (value.target is aten.mul.Tensor and len(operands_of(value)) == 1):
        if not isinstance(args_of(value)[0], Node):
            break
        value = args_of(value)[0]
    return value


def exponentials(node: Node) -> list[Node]:
    """The exponentials that enter a sum, or a product with values."""
    if node.target is aten.sum.dim_IntList:
        node = source(args_of(node)[0])
        if node.target is not aten.mul.Tensor:
            return [node] if node.target in EXPONENTIALS else []
    return [factor for factor in map(source, operands_of(node)) if factor.target in EXPONENTIALS]


def weighted_row(product: Element) -> tuple[Contraction, Row]:
    """A product of exponentials and values. Raises NoMatch with the reason if it is none."""
    found = contraction(product)
    weights = found.left if found.left.origin.target in EXPONENTIALS else found.right
    return found, Row.of(weights, found.over)


def summed_row(total: Element) -> tuple[float, Row]:
    """The exponentials of a whole row that are added up, and a factor."""
    summand, over = summed(total)
    factor, weights = summand.apart()
    row = Row.of(weights, over)
    if row.columns.read is not row.columns.whole:
        raise NoMatch("only some of the exponentials of a row are summed", weights.origin)
    return factor, row
