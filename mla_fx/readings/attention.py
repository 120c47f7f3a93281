"""Scaled dot-product attention in any spelling."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import OpOverload

from .algebra import allowance, as_product, as_sum
from .arithmetic import EXPONENTIALS, SOFTMAX
from .axes import Digit, Index, combine, fresh, of_axis, shifted
from .calls import CASTS, args_of, argument
from .codes.products import holds_codes
from .constant import constant
from .contraction import Contraction, contraction, scaled_product
from .element import Element, computed_from, first_reader, operand, readers, resolve
from .logits import Mask, added_scores, logits
from .reading import Reading
from .rows import MOVES, is_product
from .same_value import equal_calls
from .sizes import Size, ratio
from .softmax import Softmax, divided_late, division, is_softmax, softmax
from .views import MOVERS, fresh_index, has_dim, pads_with_zero, seams, shape_of

aten = torch.ops.aten

FUSED_ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)

ANCHORS = frozenset({*SOFTMAX, *FUSED_ATTENTION, *EXPONENTIALS})
STEPS = frozenset(
    {*MOVERS, *CASTS, aten.where.self, aten.mul.Tensor, aten.div.Tensor, aten.nan_to_num.default}
)


@dataclass(frozen=True)
class Causal(Reading):
    """Row number `rows` attends to the keys up to its own number."""

    rows: Index


@dataclass(frozen=True)
class Attention(Reading):
    """`sum over keys of softmax(logits) * value`, read at `index` of `node`.

    The logits are the sum of `scores` and the added masks, then filled by the other masks. Padded values leave
    `padding` zeros at the end of the output. `sink` is one more logit per row, without a value, neither scaled nor
    masked: a graph value or a number."""

    index: tuple[Index, ...]
    scores: tuple[Contraction, ...]
    masks: tuple[Mask, ...]
    causal: Causal | None
    value: Element
    value_factor: float
    keys: Index
    padding: int = 0
    sink: Element | float | None = None
    logits: Element | None = None
    """What the softmax is of, if that is a value of the graph."""
    zeroes: bool = False
    """Rows whose scores are all minus infinity give zeros, and not NaN."""

    @property
    def scope(self) -> Iterator[Index]:
        yield from (*self.index, self.keys, *self.value.index)
        yield from (part for mask in self.masks for part in mask.element.index)


def anchors(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the nodes at which attention may be read: each softmax whose result enters a product, quantised or not."""
    for node in graph.nodes:
        if node.target in ANCHORS and _begins_attention(node):
            yield node


def _begins_attention(node: Node) -> bool:
    if node.target in FUSED_ATTENTION:
        return True
    return (node.target in SOFTMAX or is_softmax(node)) and (weighted_sum(node) or codes_of(node)) is not None


def attention(node: Node) -> Attention:
    """Read the attention at anchor `node`. Raises NoMatch if there is none."""
    if node.target in FUSED_ATTENTION:
        return _fused(node)
    if _has_one_key(node):
        raise NoMatch("attention over a single key", node)
    late = division(node) if node.target in EXPONENTIALS else None
    if late is not None:
        return weighted_by(node, late[1], *divided_late(late[1]))
    output = weighted_sum(node)
    if output is None:
        reason = "probabilities are rounded to whole numbers before they multiply the values"
        raise NoMatch(reason, codes_of(node))
    return weighted_by(node, output, *_softmax_times_values(output, node))


def _has_one_key(node: Node) -> bool:
    """Products with one key are read as anything but a sum over keys."""
    if node.target in SOFTMAX:
        dim = args_of(node)[1]
        return has_dim(len(shape_of(node)), dim) and shape_of(node)[dim] == 1
    total = first_reader(node, {aten.sum.dim_IntList}, MOVES)
    if total is None:
        return False
    sizes = shape_of(args_of(total)[0])
    return any(has_dim(len(sizes), dim) and sizes[dim] == 1 for dim in args_of(total)[1] or ())


def weighted_by(node: Node, output: Node, index: tuple[Index, ...], weighted: Contraction, found: Softmax) -> Attention:
    """Attention whose probabilities, at `node`, enter a product with the values, `weighted`."""
    value = weighted.right if _is_computed_from(weighted.left.origin, node) else weighted.left
    keys = of_axis(found.axis)
    if weighted.over != (keys,):
        raise NoMatch("the values are not summed over the softmax axis alone", output)
    scores, masks = logits(found.logits, allowance(), contraction)
    for mask in masks:
        if holds_codes(mask.element):
            how = "expected latents that are dequantised: codes times scales"
            raise NoMatch(f"scores of codes are multiplied by scales, {how}", mask.element.origin)
    sink = _sink(found.sink) if isinstance(found.sink, Element) else found.sink
    part = Attention(output, index, scores, masks, None, value, weighted.factor, keys)
    return _unpadded(replace(part, sink=sink, logits=found.logits, zeroes=found.zeroes))


def _softmax_times_values(output: Node, node: Node) -> tuple[tuple[Index, ...], Contraction, Softmax]:
    """Where the result is read, the product with the values, and the softmax."""
    index = fresh_index(output)
    weighted = contraction(resolve(output, index))
    is_left = _is_computed_from(weighted.left.origin, node)
    for side in (weighted.left, weighted.right):
        _check_not_scaled(side, node)
    return index, weighted, softmax(weighted.left if is_left else weighted.right, weighted.over)


def _check_not_scaled(side: Element, probabilities: Node) -> None:
    """Raises NoMatch if a side of the product with the values is the probabilities times something else."""
    factors = [factor.origin for factor, _ in as_product(side).factors]
    others = [name_of(factor) for factor in factors if not _is_computed_from(factor, probabilities)]
    if 0 < len(others) < len(factors):
        because = "expected none: multiply the values, as by the scales of their codes"
        raise NoMatch(f"probabilities are multiplied by {', '.join(others)}, {because}", side.origin)


def _sink(logit: Element) -> Element | float:
    """The logit of the column without a value: one value, to which at most zeros are added, or a number."""
    total = as_sum(logit)
    number, values = total.constant, list[Element]()
    for term in total.terms:
        known = 0.0 if pads_with_zero(term.origin, term.index) else constant(term.origin)
        if known is None:
            values.append(term)
        else:
            number += term.factor * known
    if not values:
        return number
    return values[0] if len(values) == 1 and number == 0 else logit


def _unpadded(found: Attention) -> Attention:
    """Attention over the values without the zeros that pad them to the width of the keys."""
    value, last = found.value, found.index[-1]
    for axis, cut in seams(value.node, value.index):
        if value.node.target is not aten.constant_pad_nd.default or last.axis is not axis:
            continue
        kept = fresh(cut)
        narrow, rest = value.at({axis: kept}), value.at({axis: shifted(fresh(axis.size - cut), cut)})
        if pads_with_zero(rest.node, rest.index):
            factor, narrow = narrow.apart()
            factor *= found.value_factor
            index = (*found.index[:-1], kept)
            return replace(found, index=index, value=narrow, value_factor=factor, padding=axis.size - cut)
    return found


def _is_computed_from(value: Node, node: Node) -> bool:
    """Whether no product is between the two, or between the value and an equal node."""
    return any(equal_calls(found, node) for found in computed_from(value, is_product))


def weighted_sum(node: Node) -> Node | None:
    """The product that consumes a softmax's probabilities; None if there is none."""
    return next(filter(is_product, readers(node, STEPS)), None)


def codes_of(node: Node) -> Node | None:
    """The call that rounds a softmax's probabilities to codes; None if there is none."""
    return first_reader(node, {aten.round.default}, STEPS)


def _fused(node: Node) -> Attention:
    """Read one of PyTorch's fused attention operators, whose first result is the output."""
    query, key, value = args_of(node)[:3]
    named = {argument.name: position for position, argument in enumerate(_schema(node).arguments)}

    def option(name: str, default: Any = None) -> Any:
        return argument(node, named[name], name, default) if name in named else default

    if option("dropout_p", 0.0):
        raise NoMatch("attention with dropout is not fused", node)
    output = node if isinstance(node.meta["val"], torch.Tensor) else _first_result(node)
    index = fresh_index(output)
    *batch, row, column = index
    keys, inner = fresh(shape_of(key)[-2]), fresh(shape_of(query)[-1])
    if keys.axis is None:
        raise NoMatch("attention over a single key", node)
    key_batch, value_batch = (_shared(node, name, given, batch) for name, given in (("key", key), ("value", value)))
    scale = _scale(node, option("scale"), shape_of(query)[-1])
    left, right = operand(query, (*batch, row, inner)), operand(key, (*key_batch, keys, inner))
    score = scaled_product(node, scale, left, right, (inner,))
    mask = option("attn_mask") if "attn_mask" in named else option("attn_bias")
    more, masks = ((), ()) if mask is None else _given_mask(mask, (*batch, row, keys))
    causal = Causal(node, row) if option("is_causal", False) else None
    factor, values = operand(value, (*value_batch, keys, column)).apart()
    return _unpadded(Attention(output, index, (score, *more), masks, causal, values, factor, keys, zeroes=True))


def _shared(node: Node, name: str, given: Node, batch: list[Index]) -> list[Index]:
    """Where keys or values are read: consecutive query heads may share one of theirs."""
    query = args_of(node)[0]
    sizes, wanted = shape_of(given)[:-2], shape_of(query)[:-2]
    if len(sizes) != len(wanted) or any(
        size not in (1, own) for size, own in zip(sizes[:-1], wanted[:-1], strict=True)
    ):
        raise NoMatch(f"the {name} belongs to other sequences than the query", node)
    if not sizes or sizes[-1] in (1, wanted[-1]):
        return batch
    group, head = ratio(wanted[-1], sizes[-1]), batch[-1].axis
    if group is None or head is None:
        raise NoMatch(f"the query has {wanted[-1]} heads, the {name} {sizes[-1]}", node)
    return [*batch[:-1], combine(0, [(Digit(head, group, sizes[-1]), 1)])]


def _scale(node: Node, given: Any, width: Size) -> float:
    if given is None and isinstance(width, int):
        return float(width**-0.5)
    scale = constant(given)
    if scale is None:
        raise NoMatch("the softmax scale is not a compile-time number", node)
    return scale


def _schema(node: Node) -> Any:
    assert isinstance(node.target, OpOverload), "a fused attention operator has a schema"
    return node.target._schema


def _given_mask(mask: Node, index: tuple[Index, ...]) -> tuple[tuple[Contraction, ...], tuple[Mask, ...]]:
    """Scores of heads, rows and keys, such as those of rotary parts, and masks."""
    element = operand(mask, index)
    if mask.meta["val"].dtype is torch.bool:
        return (), (Mask(mask, element, -math.inf),)
    *_, heads, row, keys = (part.axes for part in index)

    def score(term: Element) -> Contraction:
        found = contraction(term)
        sides = [{*side.axes} for side in (found.left, found.right)]
        if not any(
            query >= heads | row and key >= keys and query.isdisjoint(keys) for query, key in permutations(sides)
        ):
            raise NoMatch("a mask is a product of other things than queries and keys", found.node)
        return found

    return added_scores(element, score)


def _first_result(node: Node) -> Node:
    for user in node.users:
        if user.target is operator.getitem and args_of(user)[1] == 0:
            return user
    raise NoMatch("the attention's output is not used", node)
