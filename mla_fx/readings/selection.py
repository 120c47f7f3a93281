"""Masks that hide all keys but those that a query chose by top-k.

    mask = new_zeros(B, S, T).scatter(-1, scores.topk(k).indices, True)

Other conditions may hide more keys beside it. A mask of numbers hides keys by minus infinity. The keys that one query
chose are different, because they are places of largest values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .attention import MASKED_FILL
from .axes import Index, extent, fresh
from .behind import is_product
from .calls import CASTS, args_of, argument
from .causal import BOTH, EITHER, MOST_CONDITIONS, always
from .constant import constant
from .element import Element, computed_from, operand, resolve
from .reading import Reading
from .sizes import Size
from .softmax import NOT
from .views import shape_of

aten = torch.ops.aten
NONE = "no part of the mask provably hides all keys but chosen ones, with scores of minus infinity"
HOLDS_PLACES = (torch.int32, torch.int64)  # of keys, however many there are


@dataclass(frozen=True)
class Selection(Reading):
    """The numbers of the keys that a query chose are the element `keys`; `chosen` counts them, `count` of them."""

    keys: Element
    chosen: Index

    @property
    def count(self) -> Size:
        return extent(self.chosen)


def selection(mask: Node, index: tuple[Index, ...]) -> Selection:
    """Read which keys a mask lets each query see at most. `index` has the axes of sequences, heads, queries and keys.

    Raises NoMatch with the reason unless it hides every key that its query did not choose."""
    misses = list[NoMatch]()
    for scatter, is_seen in _parts(operand(mask, index)):
        try:
            return _chosen(scatter, is_seen, index[-1])
        except NoMatch as miss:
            misses.append(miss)
    raise misses[0] if misses else NoMatch(NONE, mask)


def choices(mask: Node) -> Iterator[Node]:
    """The calls of topk over as many values as there are keys that a mask is made of. No product is between them: what
    chose the experts of an earlier layer is behind products."""
    keys, topk = shape_of(mask)[-1], aten.topk.default
    for node in computed_from(mask, lambda node: node.target is topk or is_product(node)):
        if node.target is topk and shape_of(args_of(node)[0])[argument(node, 2, "dim", -1)] == keys:
            yield node


def _parts(mask: Element) -> Iterator[tuple[Element, bool]]:
    """The scatters in a mask, each with the condition that a key must have there to be seen. In a mask of numbers it is
    to be other than minus infinity: True."""
    pending = [(mask, True)]
    for _ in range(MOST_CONDITIONS):
        if not pending:
            return
        element, is_seen = pending.pop()
        if element.origin.target is aten.scatter.value:
            yield element, is_seen
        elif element.origin.meta["val"].dtype == torch.bool:
            pending += _of_condition(element, is_seen)
        else:
            pending += _of_numbers(element)


def _of_condition(element: Element, is_seen: bool) -> list[tuple[Element, bool]]:
    node, index = element.node, element.index
    if node.target in NOT:
        return [(operand(args_of(node)[0], index), not is_seen)]
    if node.target in (BOTH if is_seen else EITHER):
        return [(operand(value, index), is_seen) for value in args_of(node)[:2]]
    return []


def _of_numbers(element: Element) -> list[tuple[Element, bool]]:
    """What hides by minus infinity wherever the whole does."""
    node, index = element.origin, element.index
    if element.factor != 1.0 or element.scales is not None:
        return []
    if node.target is aten.where.self:
        condition, chosen, other = args_of(node)
        ways = [(chosen, other, True), (other, chosen, False)]
    elif node.target in MASKED_FILL:
        chosen, condition, other = args_of(node)
        ways = [(chosen, other, False)]
    else:
        return []
    return [
        part
        for kept, hidden, is_seen in ways
        if constant(hidden) == -math.inf
        for part in ((operand(condition, index), is_seen), (operand(kept, index), True))
    ]


def _chosen(scatter: Element, is_seen: bool, keys: Index) -> Selection:
    """Read a scatter that writes where a query chose."""
    node, rank = scatter.node, len(scatter.index)
    base, dim, places, value = args_of(node)
    dim %= rank
    if scatter.index[dim] != keys or keys.axis is None:
        raise NoMatch(f"{name_of(node)} does not write along the keys", node)
    if not _hides(base, value, is_seen):
        raise NoMatch(f"{name_of(node)} does not hide the keys that were not chosen", node)
    sizes = shape_of(places)
    if any(size != own for at, (size, own) in enumerate(zip(sizes, shape_of(node), strict=True)) if at != dim):
        raise NoMatch(f"{name_of(node)} writes for some of the queries", node)
    chosen = fresh(sizes[dim])
    index = (*scatter.index[:dim], chosen, *scatter.index[dim + 1 :])
    if keys.axes & {axis for part in index for axis in part.axes}:
        raise NoMatch("which keys are chosen depends on the key", node)
    return Selection(node, _places(resolve(places, index), chosen, shape_of(node)[dim]), chosen)


def _hides(base: Node, value: object, is_seen: bool) -> bool:
    """Whether keys are hidden where nothing is written. A condition that is written must show them: hiding the chosen
    ones is the contrary."""
    if base.meta["val"].dtype == torch.bool:
        return always(base) is (not is_seen) and bool(value) is is_seen
    return constant(base) == -math.inf


def _places(found: Element, chosen: Index, keys: Size) -> Element:
    """Follow numbers of keys to the top-k that chose them, which makes them different, and places of keys."""
    while found.node.target in CASTS and found.node.meta["val"].dtype in HOLDS_PLACES:
        found = operand(args_of(found.node)[0], found.index)
    node = found.node
    topk = args_of(node)[0] if node.target is operator.getitem and args_of(node)[1] == 1 else None
    if not isinstance(topk, Node) or topk.target is not aten.topk.default:
        raise NoMatch(f"{name_of(node)} is not the indices of a top-k, so it may name a key twice", node)
    dim = argument(topk, 2, "dim", -1) % len(found.index)
    others = (part for place, part in enumerate(found.index) if place != dim)
    if found.index[dim] != chosen or any(part.axes & chosen.axes for part in others):
        raise NoMatch("chosen keys are read in another order than the one of their top-k", node)
    if shape_of(args_of(topk)[0])[dim] != keys:
        raise NoMatch("the top-k chooses among other things than keys", topk)
    return found
