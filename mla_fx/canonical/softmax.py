"""Softmax and scaled dot-product attention in any spelling."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from mla_fx.errors import NoMatch

from .algebra import as_sum
from .axes import Axis, Index, fresh, leaves, settle, shifted
from .contraction import Contraction, contraction, name_of, summed
from .element import CASTS, Element, constant, operand, resolve
from .views import MOVERS, args_of, argument, cuts, fresh_index, pads_with_zero, shape_of

aten = torch.ops.aten

MASKED = -1e4  # logits at or below this are meant to be minus infinity
SOFTMAX = frozenset({aten._softmax.default, aten.softmax.int, aten._safe_softmax.default})
FUSED_ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


NOT = frozenset({aten.logical_not.default, aten.bitwise_not.default})
MASKED_FILL = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
PRODUCTS = frozenset({aten.bmm.default, aten.mm.default, aten.matmul.default, aten.sum.dim_IntList})
STEPS = frozenset({*MOVERS, *CASTS, aten.where.self, aten.mul.Tensor})


@dataclass(frozen=True)
class Mask:
    """A term of the logits that no query or key enters. With `fill` the element is a condition, and the logits are
    `fill` wherever it is not `keep_where`."""

    element: Element
    fill: float | None = None
    keep_where: bool = True


@dataclass(frozen=True)
class Attention:
    """`sum over axis of softmax(logits) * value`; the logits are a sum of `scores` and masks."""

    node: Node
    index: tuple[Index, ...]
    scores: tuple[Contraction, ...]
    masks: tuple[Mask, ...]
    is_causal: bool
    value: Element
    axis: Axis
    padding: int = 0
    """How many zeros the output has behind what `index` reads, because the values were padded."""


def anchors(graph: torch.fx.Graph) -> Iterator[Node]:
    """The nodes at which attention may begin to be read: each softmax whose result enters a product."""
    for node in graph.nodes:
        if node.target in FUSED_ATTENTION or (_is_softmax(node) and weighted_sum(node) is not None):
            yield node


def _is_softmax(node: Node) -> bool:
    if node.target is aten.div.Tensor:
        return _exponential(args_of(node)[0]) is not None
    return node.target in SOFTMAX


def softmax(element: Element) -> tuple[Element, Axis]:
    """The logits and the axis of a softmax. Raises NoMatch if `element` is none."""
    node, index = element.node, element.index
    if element.scale != 1.0:
        raise NoMatch("the attention probabilities are multiplied by a number", node)
    if node.target in SOFTMAX:
        return operand(args_of(node)[0], index), _axis(index, args_of(node)[1], node)
    if node.target is aten.where.self:
        return _guarded(element)
    if node.target is aten.div.Tensor and (exponential := _exponential(args_of(node)[0])) is not None:
        return _divided(element, exponential)
    raise NoMatch(f"expected a softmax, found {name_of(node)}", node)


def _axis(index: tuple[Index, ...], dim: int, node: Node) -> Axis:
    where = index[dim]
    if len(where.terms) != 1 or where.offset != 0 or where.axes[0].size != shape_of(node)[dim]:
        raise NoMatch("not all the probabilities of the softmax enter the product with the values", node)
    return where.axes[0]


def _exponential(value: object) -> Node | None:
    """The exp whose result `value` is, through views and casts."""
    for _ in range(6):
        if not isinstance(value, Node):
            return None
        if value.target is aten.exp.default:
            return value
        if value.target not in MOVERS and value.target not in CASTS:
            return None
        value = value.args[0] if value.args else None
    return None


def _divided(element: Element, exponential: Node) -> tuple[Element, Axis]:
    """`exp(x - max) / sum(exp(x - max))`."""
    node = element.node
    numerator, denominator = (operand(value, element.index) for value in args_of(node)[:2])
    if denominator.node.target is not aten.sum.dim_IntList or numerator.node is not exponential:
        raise NoMatch(f"expected a softmax, found {name_of(node)}", node)
    summand, over = summed(denominator)
    axes = leaves(axis for part in over for axis in part.axes)
    if summand.node is not exponential or len(axes) != 1:
        raise NoMatch("what divides the exponentials is not their sum", node)
    dims = [dim for dim, part in enumerate(summand.index) if axes[0] in part.axes]
    axis = _axis(numerator.index, dims[0], exponential)
    inner = operand(args_of(exponential)[0], numerator.index)
    if inner.node.target is not aten.sub.Tensor:
        return inner, axis
    logits, peak = (operand(value, inner.index, inner.scale) for value in args_of(inner.node)[:2])
    if axis in peak.settled().axes:
        raise NoMatch("what is subtracted before the exponential differs along the softmax axis", node)
    return logits, axis


def _guarded(element: Element) -> tuple[Element, Axis]:
    """A softmax whose fully masked rows are zeroed, as scaled_dot_product_attention does."""
    condition, zero, probability = args_of(element.node)
    if constant(zero) != 0:
        raise NoMatch("the attention probabilities are replaced where a condition holds", element.node)
    logits, axis = softmax(operand(probability, element.index))
    if not _tests_for_masked_rows(operand(condition, element.index), logits):
        raise NoMatch("the attention probabilities are masked after the softmax", element.node)
    return logits, axis


def _tests_for_masked_rows(condition: Element, logits: Element) -> bool:
    """The condition is `not any(logits != -inf)`."""
    if condition.node.target not in NOT:
        return False
    some = operand(args_of(condition.node)[0], condition.index)
    if some.node.target not in (aten.any.dim, aten.any.dims):
        return False
    tested, is_negated = args_of(some.node)[0], False
    while tested.target in NOT:
        tested, is_negated = args_of(tested)[0], not is_negated
    if tested.target is not (aten.eq.Scalar if is_negated else aten.ne.Scalar):
        return False
    value, number = args_of(tested)[:2]
    return number == -math.inf and resolve(value, fresh_index(value)).node is logits.node


def attention(node: Node) -> Attention:
    """Reads the attention that begins at anchor `node`. Raises NoMatch if there is none."""
    if node.target in FUSED_ATTENTION:
        return _fused(node)
    output = weighted_sum(node)
    assert output is not None, "an anchor enters a product"
    index = fresh_index(output)
    weighted = contraction(resolve(output, index))
    is_left = weighted.left.node in (node, *_guards(node))
    probability, value = (weighted.left, weighted.right) if is_left else (weighted.right, weighted.left)
    logits, axis = softmax(probability)
    if weighted.axes != leaves([axis]):
        raise NoMatch("the values are not summed over the softmax axis alone", output)
    if weighted.scale != 1.0:
        raise NoMatch(f"the attention's result is multiplied by a number, {weighted.scale:.6g}", output)
    scores, masks = _logits(logits)
    return _unpadded(Attention(output, index, scores, masks, False, value, axis))


def _unpadded(found: Attention) -> Attention:
    """Attention over the values without the zeros that were put behind them to make them as wide as the keys."""
    value, last = found.value.settled(), settle(found.index[-1])
    for axis, cut in cuts(value.node, value.index):
        if value.node.target is not aten.constant_pad_nd.default or not last.is_axis(axis):
            continue
        kept = fresh(cut)
        narrow, rest = value.at({axis: kept}), value.at({axis: shifted(fresh(axis.size - cut), cut)})
        if pads_with_zero(rest.node, rest.index):
            return replace(found, index=(*found.index[:-1], kept), value=narrow, padding=axis.size - cut)
    return found


def _guards(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is aten.where.self]


def weighted_sum(node: Node) -> Node | None:
    """The product that consumes the probabilities of a softmax, through the views between; None if there is none."""
    pending, seen = list(node.users), set()
    while pending:
        user = pending.pop(0)
        if user in seen:
            continue
        seen.add(user)
        if user.target in PRODUCTS:
            return user
        if user.target in STEPS:
            pending += user.users
    return None


def _logits(element: Element) -> tuple[tuple[Contraction, ...], tuple[Mask, ...]]:
    """The additive terms of the logits: products of queries and keys, and masks."""
    total = as_sum(element)
    if total.constant:
        raise NoMatch("a number is added to the attention scores", element.node)
    scores: list[Contraction] = []
    masks: list[Mask] = []
    for term in total.terms:
        if (filled := _filled(term)) is not None:
            kept, mask = filled
            inner_scores, inner_masks = _logits(kept)
            scores += inner_scores
            masks += [mask, *inner_masks] if inner_scores else [Mask(term)]
            continue
        try:
            scores.append(contraction(term))
        except NoMatch:
            masks.append(Mask(term))
    return tuple(scores), tuple(masks)


def _filled(element: Element) -> tuple[Element, Mask] | None:
    """`where(condition, scores, -inf)` either way around, as masked_fill leaves it: the scores and the mask."""
    if element.node.target in MASKED_FILL:
        kept, condition, fill = args_of(element.node)
        number = constant(fill)
        if number is None or number > MASKED:
            return None
        return operand(kept, element.index, element.scale), Mask(operand(condition, element.index), number, False)
    if element.node.target is not aten.where.self:
        return None
    condition, chosen, other = args_of(element.node)
    for kept, fill, keep_where in ((chosen, constant(other), True), (other, constant(chosen), False)):
        if fill is not None and fill <= MASKED and constant(kept) is None:
            mask = Mask(operand(condition, element.index), fill, keep_where)
            return operand(kept, element.index, element.scale), mask
    return None


def _fused(node: Node) -> Attention:
    """One of PyTorch's fused attention operators, whose first result is the output."""
    query, key, value = args_of(node)[:3]
    named = {argument.name: position for position, argument in enumerate(_schema(node).arguments)}

    def option(name: str, default: Any = None) -> Any:
        return argument(node, named[name], name, default) if name in named else default

    if option("dropout_p", 0.0):
        raise NoMatch("attention with dropout is left alone", node)
    output = node if isinstance(node.meta["val"], torch.Tensor) else _first_result(node)
    index = fresh_index(output)
    *batch, row, column = index
    keys, inner = fresh(shape_of(key)[-2]), fresh(shape_of(query)[-1])
    scale = option("scale")
    if scale is None:
        scale = float(shape_of(query)[-1]) ** -0.5
    left, right = operand(query, (*batch, row, inner)), operand(key, (*batch, keys, inner))
    axes = (*inner.axes,)
    score = Contraction(left.unscaled(), right.unscaled(), axes, scale * left.scale * right.scale, node)
    mask = option("attn_mask") if "attn_mask" in named else option("attn_bias")
    masks = () if mask is None else (_given_mask(mask, (*batch, row, keys)),)
    if not keys.terms:
        raise NoMatch("attention over a single key", node)
    values = operand(value, (*batch, keys, column))
    is_causal = bool(option("is_causal", False))
    return _unpadded(Attention(output, index, (score,), masks, is_causal, values, keys.axes[0]))


def _schema(node: Node) -> Any:
    assert isinstance(node.target, OpOverload), "a fused attention operator has a schema"
    return node.target._schema


def _given_mask(mask: Node, index: tuple[Index, ...]) -> Mask:
    if mask.meta["val"].dtype is torch.bool:
        return Mask(operand(mask, index), float("-inf"), True)
    return Mask(operand(mask, index))


def _first_result(node: Node) -> Node:
    for user in node.users:
        if user.target is operator.getitem and args_of(user)[1] == 0:
            return user
    raise NoMatch("the attention's output is not used", node)
