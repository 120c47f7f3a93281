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
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_sum
from .attention import Mask
from .axes import Index, extent, fresh
from .behind import is_product
from .calls import CASTS, args_of, argument
from .causal import BOTH, EITHER, MOST_CONDITIONS, always
from .constant import constant
from .element import Element, computed_from, operand, resolve
from .reading import Reading
from .sizes import Size
from .softmax import MASKED_FILL, NOT
from .views import shape_of

aten = torch.ops.aten
NONE = "no part of the mask provably hides all keys but chosen ones, with scores of minus infinity"
SCATTERS = frozenset({aten.scatter.value, aten.scatter.src})
HOLDS_PLACES = (torch.int32, torch.int64)  # of keys, however many there are


@dataclass(frozen=True)
class Selection(Reading):
    """A query chose, of all `keys`, those whose numbers are the element `numbers`; `chosen` counts them, `count` of
    them. The masks may hide some of them."""

    keys: Index
    numbers: Element
    chosen: Index
    masks: tuple[Mask, ...]

    @property
    def count(self) -> Size:
        return extent(self.chosen)


class _Part(NamedTuple):
    """A part of a mask, and the condition that a key must have there to be seen. In a mask of numbers it is to be other
    than minus infinity: True. A key that is seen there is hidden by the masks `beside` alone."""

    element: Element
    is_seen: bool
    beside: tuple[Mask, ...]

    def inner(self, element: Element, is_seen: bool, *masks: Mask) -> _Part:
        return _Part(element, is_seen, (*self.beside, *masks))


def selection(mask: Node, index: tuple[Index, ...]) -> Selection:
    """Read which keys a mask lets each query see at most. `index` has the axes of sequences, heads, queries and keys.

    Raises NoMatch with the reason unless it hides every key that its query did not choose."""
    misses = list[NoMatch]()
    for part in _scatters(operand(mask, index)):
        try:
            return _chosen(part, index[-1])
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


def _scatters(mask: Element) -> Iterator[_Part]:
    """The scatters in a mask. All of it hides where one of its parts does."""
    pending = [_Part(mask, True, ())]
    for _ in range(MOST_CONDITIONS):
        if not pending:
            return
        part = pending.pop()
        if part.element.origin.target in SCATTERS:
            yield part
        elif part.element.origin.meta["val"].dtype == torch.bool:
            pending += _of_condition(part)
        else:
            pending += [*_of_sum(part), *_of_fill(part)]


def _of_condition(part: _Part) -> list[_Part]:
    node, index, is_seen = part.element.node, part.element.index, part.is_seen
    if node.target in NOT:
        return [part.inner(operand(args_of(node)[0], index), not is_seen)]
    if node.target not in (BOTH if is_seen else EITHER):
        return []
    one, other = (operand(value, index) for value in args_of(node)[:2])
    ways = (one, other), (other, one)
    return [part.inner(here, is_seen, Mask(node, there, -math.inf, is_seen)) for here, there in ways]


def _of_sum(part: _Part) -> list[_Part]:
    total = as_sum(part.element)
    if len(total.terms) < 2 or total.constant:
        return []
    added = [Mask(term.origin, term) for term in total.terms]
    return [part.inner(one.element, True, *(mask for mask in added if mask is not one)) for one in added]


def _of_fill(part: _Part) -> list[_Part]:
    element = part.element
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
    found = list[_Part]()
    for kept, hidden, is_seen in ways:
        if constant(hidden) != -math.inf or not isinstance(kept, Node):
            continue
        where, numbers = operand(condition, index), operand(kept, index)
        found.append(part.inner(where, is_seen, *_added(numbers)))
        found.append(part.inner(numbers, True, Mask(node, where, -math.inf, is_seen)))
    return found


def _added(numbers: Element) -> tuple[Mask, ...]:
    return () if constant(numbers.origin) == 0 else (Mask(numbers.origin, numbers),)


def _chosen(part: _Part, keys: Index) -> Selection:
    """Read a scatter that writes where a query chose."""
    node, rank = part.element.node, len(part.element.index)
    base, dim, places, source = args_of(node)
    dim, value = dim % rank, _number(source)
    if part.element.index[dim] != keys or keys.axis is None:
        raise NoMatch(f"{name_of(node)} does not write along the keys", node)
    if value is None or not _hides(base, value, part.is_seen):
        raise NoMatch(f"{name_of(node)} does not hide the keys that were not chosen", node)
    sizes = shape_of(places)
    if any(size != own for at, (size, own) in enumerate(zip(sizes, shape_of(node), strict=True)) if at != dim):
        raise NoMatch(f"{name_of(node)} writes for some of the queries", node)
    chosen = fresh(sizes[dim])
    index = (*part.element.index[:dim], chosen, *part.element.index[dim + 1 :])
    if keys.axes & {axis for part in index for axis in part.axes}:
        raise NoMatch("which keys are chosen depends on the key", node)
    found = _places(resolve(places, index), chosen, shape_of(node)[dim])
    is_number = base.meta["val"].dtype != torch.bool and value != 0
    written = (Mask(node, part.element),) if is_number else ()
    return Selection(node, keys, found, chosen, (*part.beside, *written))


def _number(source: Any) -> float | None:
    """What is written, if that is one number; flags count as numbers."""
    if not isinstance(source, Node):
        return float(source)
    return always(source) if source.meta["val"].dtype == torch.bool else constant(source)


def _hides(base: Node, value: float, is_seen: bool) -> bool:
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
