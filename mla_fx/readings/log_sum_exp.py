"""The logarithm of the sum that a softmax divides by: `logsumexp`, or `largest + log(sum(exp(scores - largest)))`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_sum
from .attention import Attention
from .axes import Axis, Index, extent, shifted
from .calls import CASTS, args_of
from .divided_late import SUMS
from .element import Element, computed_from, computed_with, readers, resolve
from .reading import Reading, renamed
from .softmax import LOGARITHMS, LogOfSum, exponential, log_of_sum
from .views import MOVERS, fresh_index

aten = torch.ops.aten

MOVES = frozenset({*MOVERS, *CASTS})
OTHER_SCORES = "the logarithm is not of the sum that the softmax divides by"


@dataclass(frozen=True)
class LogSumExp(Reading):
    """`log(sum over keys of exp(logits)) / unit`, read at `index` of `node`, at the axes of an attention."""

    index: tuple[Index, ...]
    unit: float
    is_nan: bool = False
    """Rows of minus infinity give NaN, and not minus infinity."""

    @property
    def constants(self) -> tuple[float, ...]:
        return (self.unit,)


def beside(anchor: Node) -> list[Node]:
    """The values computed from the scores of an attention that may be logarithms of the sum it divides by."""
    products = [node for node in computed_from(anchor, _is_product) if _is_product(node)]
    return logarithms(products)


def logarithms(products: Iterable[Node]) -> list[Node]:
    """`logsumexp`, and sums with a logarithm, that are computed from some products, and from no others of them."""
    found = dict[Node, None]()
    for node in computed_with(products, lambda user: _is_product(user) or user.target in LOGARITHMS):
        if node.target is aten.logsumexp.default:
            found[node] = None
        elif node.target in LOGARITHMS:
            found.update(dict.fromkeys(user for user in readers(node, MOVES) if user.target is aten.add.Tensor))
    return list(found)


def _is_product(node: Node) -> bool:
    if node.target is aten.sum.dim_IntList:
        return exponential(args_of(node)[0]) is None
    return node.target in SUMS


def log_sum_exp(node: Node, attention: Attention) -> LogSumExp:
    """Read a value as the logarithm of the sum that an attention divides by. Raises NoMatch if it is not that one."""
    if attention.logits is None:
        raise NoMatch("the scores of the attention are no values of the graph", attention.node)
    index = fresh_index(node)
    total = as_sum(resolve(node, index))
    unit = next((LOGARITHMS[term.origin.target] for term in total.terms if term.origin.target in LOGARITHMS), 1.0)
    found = log_of_sum([term.times(unit) for term in total.terms], node)
    if found.others or total.constant:
        raise NoMatch("the value beside the logarithm is not the maximum of the scores", node)
    if found.logits.origin is not attention.logits.origin:
        one, other = name_of(found.logits.origin), name_of(attention.logits.origin)
        raise NoMatch(f"{OTHER_SCORES}: it is of {one}, expected {other}", node)
    names = _names(found, index, attention, attention.logits)
    logits = renamed(found.logits, names)
    if logits.factor != attention.logits.factor:
        factors = f"{logits.factor:.6g} times the scores, the softmax of {attention.logits.factor:.6g} times these"
        raise NoMatch(f"the logarithm is of the sum for {factors}", node)
    if logits != attention.logits:
        raise NoMatch(OTHER_SCORES, node)
    return LogSumExp(node, renamed(index, names), unit, found.is_nan)


def _names(found: LogOfSum, index: tuple[Index, ...], attention: Attention, logits: Element) -> dict[Axis, Index]:
    """The attention's names for the axes of the logarithm at `index`, whose scores lie along the same dimensions."""
    mine, theirs = found.logits.index, logits.index
    pairs = zip(mine, theirs, strict=False)
    parts = ((shifted(part, -part.offset), shifted(other, -part.offset)) for part, other in pairs)
    names = {part.axis: other for part, other in parts if part.axis is not None and extent(other) == part.axis.size}
    axes = {axis for part in (*index, *mine) for axis in part.axes}
    if len(mine) != len(theirs) or not axes <= names.keys() or names.get(found.keys) != attention.keys:
        raise NoMatch("the logarithms are of scores in another shape than those of the softmax", found.logits.origin)
    return names
