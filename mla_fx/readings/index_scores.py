"""The scores by which an indexer chooses keys: products of queries and keys, where negative ones count as zero, are
weighed and summed up over heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.graph.provenance import name_of

from .algebra import allowance, as_product
from .axes import Axis, Index
from .bounds import Bounds, bounded
from .calls import args_of, argument
from .contraction import Contraction, contraction
from .element import Element, computed_from, computed_with, operand, resolve
from .logits import Mask, logits
from .reading import Reading
from .views import MOVERS, fresh_index

aten = torch.ops.aten
TOPK = aten.topk.default
POSITIVE = Bounds(low=0.0)  # or zero
Scaled = tuple[Contraction, Element | None]  # a product, and what multiplies it
RELU = "a sum over heads of weights times relu(query . key)"


@dataclass(frozen=True)
class IndexScores(Reading):
    """The largest of `factor * sum over heads of weights * relu(query . key) * key_scale` under masks, chosen among
    `keys`.

    `topk` chooses among the scores `node`, which are read at `rows` and `keys`; `dim` is the place of the keys among
    them. `product` is that of queries and keys."""

    topk: Node
    product: Node
    rows: tuple[Index, ...]
    keys: Index
    query: Element
    key: Element
    weights: Element
    key_scale: Element | None
    heads: tuple[Index, ...]
    columns: tuple[Index, ...]
    masks: tuple[Mask, ...]
    factor: float
    dim: int


def index_scores(topk: Node) -> IndexScores:
    """Read what `topk` chooses from. Raises NoMatch with the reason unless these are the scores of an indexer."""
    scores = args_of(topk)[0]
    index = fresh_index(scores)
    dim = argument(topk, 2, "dim", -1) % len(index)
    keys, rows = index[dim], index[:dim] + index[dim + 1 :]
    if not argument(topk, 3, "largest", True):
        raise NoMatch("the keys with the smallest scores are chosen", topk)
    if keys.axis is None:
        raise NoMatch("a key is chosen among one", topk)
    sums, masks = _sums(scores, index)
    if len(sums) != 1:
        raise NoMatch(f"the index scores are {len(sums)} products, expected {RELU}", topk)
    ((found, key_scale),) = sums
    factor, weights, product = _weighed(found)
    query, key = _sides(product, keys.axis, found.axes)
    if keys.axis in weights.axes:
        raise NoMatch("the weights of the index scores depend on the key", weights.origin)
    if key_scale is not None and not key_scale.axes <= key.axes:
        raise NoMatch("the index scores are multiplied by numbers that are no scales of keys", key_scale.origin)
    operands, over = (query, key, weights, key_scale), (found.over, product.over)
    return IndexScores(scores, topk, product.node, rows, keys, *operands, *over, masks, factor * product.factor, dim)


def check_read_alone(found: IndexScores) -> None:
    """Raises NoMatch if something else reads the scores. A kernel rounds them otherwise, and a program that compares
    scores with chosen ones, as by a threshold, expects equal numbers."""
    scores = {found.topk, *computed_from(found.topk)}

    def is_other(node: Node) -> bool:
        return node not in scores and node.target not in MOVERS

    users = computed_with([found.product], lambda node: node is found.topk or is_other(node))
    other = next(filter(is_other, users), None)
    if other is not None:
        what = f"index scores are also read by {name_of(other)}"
        raise NoMatch(f"{what}, and the chosen ones would be rounded otherwise", other)


def has_index_scores(topk: Node) -> bool:
    """Whether a top-k chooses from sums of products that relu made positive, masked or not."""
    scores = args_of(topk)[0]
    found = attempt(_sums, scores, fresh_index(scores))
    return found is not None and any(_has_relu(product) for product, _ in found[0])


def _sums(scores: Node, index: tuple[Index, ...]) -> tuple[tuple[Scaled, ...], tuple[Mask, ...]]:
    try:
        return logits(resolve(scores, index), allowance(), _scaled)
    except NoMatch as miss:
        raise NoMatch(f"keys are chosen by {name_of(scores)}, expected {RELU}", scores) from miss


def _scaled(element: Element) -> Scaled:
    """A product that is summed up, and what the sum is multiplied by."""
    try:
        return contraction(element), None
    except NoMatch:
        product = as_product(element)
        if len(product.factors) != 2 or any(power != 1 for _, power in product.factors):
            raise
        for (summed, _), (scale, _) in permutations(product.factors):
            if (found := _weighted_relu(summed.times(product.number))) is not None:
                return found, scale
        raise


def _weighted_relu(element: Element) -> Contraction | None:
    """The product, if relu made one of its sides positive."""
    found = attempt(contraction, element)
    return found if found is not None and _has_relu(found) else None


def _has_relu(found: Contraction) -> bool:
    return any(_of_relu(side) is not None for side in (found.left, found.right))


def _weighed(found: Contraction) -> tuple[float, Element, Contraction]:
    """The factor and the weights of a sum over heads, and the product of query and key behind relu."""
    for weights, side in ((found.left, found.right), (found.right, found.left)):
        inner = _of_relu(side)
        if inner is None:
            continue
        product = _product(inner)
        if product.factor < 0:
            raise NoMatch(f"relu is of products times {product.factor:.6g}, expected a positive number", side.origin)
        return found.factor, weights, product
    raise NoMatch(f"the index scores are sums of {name_of(found.right.origin)}, expected {RELU}", found.node)


def _product(inner: Element) -> Contraction:
    try:
        return contraction(inner)
    except NoMatch as miss:
        found = name_of(inner.origin)
        raise NoMatch(f"relu is of {found}, expected a product of query and key", inner.origin) from miss


def _of_relu(side: Element) -> Element | None:
    """What an element is the relu of, if it is one."""
    node = side.origin
    found = (args_of(node)[0], POSITIVE) if node.target is aten.relu.default else bounded(node)
    return operand(found[0], side.index) if found is not None and found[1] == POSITIVE else None


def _sides(product: Contraction, keys: Axis, heads: tuple[Axis, ...]) -> tuple[Element, Element]:
    """The query and the key of a product."""
    sides = product.left, product.right
    query, key = sides if keys in product.right.axes else reversed(sides)
    if keys in query.axes or keys not in key.axes:
        raise NoMatch("the index scores are no product of a query and a key", product.node)
    if key.axes & {*heads}:
        raise NoMatch("the indexer has keys of each head, expected keys that all heads share", key.origin)
    return query, key
