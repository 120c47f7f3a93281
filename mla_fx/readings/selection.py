"""Masks that hide all keys but those that a query chose by top-k.

    mask = new_zeros(B, S, T).scatter(-1, scores.topk(k).indices, True)

Other conditions may hide more keys beside it. A mask of numbers hides keys by minus infinity, or by the lowest number:
next to a score that is seen, both leave no probability. The keys that one query chose are different, because they are
places of largest values.
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
from mla_fx.ops.emitted.attention.tiles import LOWEST

from .algebra import as_sum
from .axes import Index, extent
from .behind import is_product
from .calls import args_of, argument
from .causal import MOST_CONDITIONS, may_hide
from .conditions import conditionals, conditions_of
from .constant import constant
from .element import Element, computed_from, operand
from .logits import Mask
from .named_keys import named, names_keys, own_numbers
from .reading import Reading
from .sizes import Size, at_most
from .views import shape_of

aten = torch.ops.aten
NONE = "no part of the mask provably hides all keys but chosen ones, with minus infinity or the lowest number"
SCATTERS = frozenset({aten.scatter.value, aten.scatter.src, aten.scatter_add.default})


@dataclass(frozen=True)
class Selection(Reading):
    """A query chose, of all `keys`, those whose numbers are the element `numbers`; `chosen` counts them, `count` of
    them. The masks may hide some of them. Where one of them or the choice hides a key, the mask is at most `fill`."""

    keys: Index
    numbers: Element
    chosen: Index
    masks: tuple[Mask, ...]
    fill: float

    @property
    def count(self) -> Size:
        return extent(self.chosen)

    @property
    def is_seen(self) -> bool:
        """Whether each query provably sees a key: one that it chose, and that nothing else hides."""
        return at_most(1, self.count) and not any(map(may_hide, self.masks))


class _Part(NamedTuple):
    """A part of a mask, and the condition that a key must have there to be seen. In a mask of numbers it is to be above
    the lowest: True. A key that is seen there is hidden by the masks `beside` alone, and another one has at most `fill`
    in the mask."""

    element: Element
    is_seen: bool
    beside: tuple[Mask, ...]
    fill: float

    def inner(self, element: Element, is_seen: bool, *masks: Mask, fill: float = -math.inf) -> _Part:
        return _Part(element, is_seen, (*self.beside, *masks), max(self.fill, fill))


def selection(mask: Node, index: tuple[Index, ...]) -> Selection:
    """Read which keys a mask lets each query see at most. `index` has the axes of sequences, heads, queries and keys.

    Raises NoMatch with the reason unless it hides every key that its query did not choose."""
    misses = list[NoMatch]()
    for part in _named(operand(mask, index)):
        try:
            return _chosen(part, index[-1])
        except NoMatch as miss:
            misses.append(miss)
    raise misses[0] if misses else NoMatch(NONE, mask)


def seems_chosen(mask: Node) -> bool:
    """Whether a mask is made of a choice, or written at numbers of keys that may be one from outside of the graph."""
    written = (shape_of(node) for node in computed_from(mask, is_product) if node.target in SCATTERS)
    return any(choices(mask)) or any(sizes[-1:] == shape_of(mask)[-1:] for sizes in written)


def choices(mask: Node) -> Iterator[Node]:
    """The calls of topk over as many values as there are keys that a mask is made of. No product is between them: what
    chose the experts of an earlier layer is behind products."""
    keys, topk = shape_of(mask)[-1], aten.topk.default
    for node in computed_from(mask, lambda node: node.target is topk or is_product(node)):
        if node.target is topk and shape_of(args_of(node)[0])[argument(node, 2, "dim", -1)] == keys:
            yield node


def _named(mask: Element) -> Iterator[_Part]:
    """The parts of a mask that numbers of keys make. All of it hides where one of its parts does."""
    pending = [_Part(mask, True, (), -math.inf)]
    for _ in range(MOST_CONDITIONS):
        if not pending:
            return
        part = pending.pop()
        if names_keys(part.element):
            yield part
        elif part.element.origin.meta["val"].dtype == torch.bool:
            pending += _of_condition(part)
        else:
            pending += [*_of_sum(part), *_of_fill(part)]


def _of_condition(part: _Part) -> list[_Part]:
    node = part.element.node
    if not all(map(_is_condition, args_of(node)[:2])):
        return []
    found = conditions_of(part.element, part.is_seen)
    if len(found) < 2:
        return [part.inner(inner, is_seen) for inner, is_seen in found]
    ways = zip(found, reversed(found), strict=True)
    return [part.inner(here, seen, Mask(node, there, -math.inf, other)) for (here, seen), (there, other) in ways]


def _is_condition(value: Any) -> bool:
    return isinstance(value, Node) and value.meta["val"].dtype == torch.bool


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
    found = list[_Part]()
    for condition, kept, hidden, is_seen in conditionals(node):
        fill = constant(hidden)
        if fill is None or not fill <= LOWEST or not isinstance(kept, Node):
            continue
        where, numbers = operand(condition, index), operand(kept, index)
        found.append(part.inner(where, is_seen, *_added(numbers), fill=fill))
        found.append(part.inner(numbers, True, Mask(node, where, -math.inf, is_seen), fill=fill))
    return found


def _added(numbers: Element) -> tuple[Mask, ...]:
    return () if constant(numbers.origin) == 0 else (Mask(numbers.origin, numbers),)


def _chosen(part: _Part, keys: Index) -> Selection:
    """Read what a query chose as the keys that its numbers name."""
    found = named(part.element, keys)
    node = found.node
    if _is_condition(node):
        shown, own, fill = float(part.is_seen), Mask(node, part.element, -math.inf, part.is_seen), part.fill
        is_hidden = found.outside != shown
    else:
        shown, own, fill = 0.0, Mask(node, part.element), max(part.fill, found.outside)
        is_hidden = found.outside <= LOWEST
    if not is_hidden:
        raise NoMatch(f"{name_of(node)} does not hide the keys that were not chosen", node)
    numbers = own_numbers(found, keys)
    _check_chosen(numbers, found.named, keys)
    masks = part.beside if found.inside == shown else (*part.beside, own)
    return Selection(node, keys, numbers, found.named, masks, fill)


def _check_chosen(numbers: Element, chosen: Index, keys: Index) -> None:
    """Numbers are different if they are the places of largest values, and places of keys."""
    node = numbers.node
    topk = args_of(node)[0] if node.target is operator.getitem and args_of(node)[1] == 1 else None
    if not isinstance(topk, Node) or topk.target is not aten.topk.default:
        raise NoMatch(f"{name_of(node)} is not the indices of a top-k, so it may name a key twice", node)
    dim = argument(topk, 2, "dim", -1) % len(numbers.index)
    others = (part for place, part in enumerate(numbers.index) if place != dim)
    if numbers.index[dim] != chosen or any(part.axes & chosen.axes for part in others):
        raise NoMatch("chosen keys are read in another order than the one of their top-k", node)
    if shape_of(args_of(topk)[0])[dim] != extent(keys):
        raise NoMatch("the top-k chooses among other things than keys", topk)
