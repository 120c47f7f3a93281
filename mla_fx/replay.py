"""A rewrite that was found in one place, done again where the graph is the same.

Between the operands of a rewrite and the values that it replaces lies a part of the graph that is closed: nothing
enters it but the operands. Where another part is the same, call for call, it computes the same from operands of its
own; so the same calls replace it, and nothing need be read again. What is not surely the same is matched anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .emitter import Emitter
from .known import signature
from .readings.element import constant, is_parameter
from .readings.views import args_of
from .replacement import Replacement

MOST_NODES = 1000  # behind the replaced values; a larger part of a graph is not kept
MOST_MET = 100  # nodes looked at on the way from an anchor to a replaced value

Images = dict[Node, Node]  # for each node at the first place, the one that corresponds to it at the second


class _Call(NamedTuple):
    """A call as it was when it was met: what is replaced soon loses its arguments."""

    node: Node
    target: Any
    args: Any
    kwargs: Any


class _Way(NamedTuple):
    """From a node to another, over its operands or over its users: which of them comes next, step by step."""

    neighbours: Callable[[Node], list[Node]]
    places: tuple[int, ...]

    def end(self, node: Node) -> Node | None:
        for place in self.places:
            ahead = self.neighbours(node)
            if place >= len(ahead):
                return None
            node = ahead[place]
        return node


@dataclass(frozen=True)
class Recipe:
    """What a rewrite read, and what it added in its place.

    `ends` are the values that are replaced, and the ways to them from the anchor. `calls` compute these from `inputs`,
    of which the rewrite knows no more than kind, shape and type: graph inputs, and operands of floating type. Behind
    an operand of whole numbers or flags it may have looked, as for a position that is never negative."""

    ends: tuple[tuple[Node, _Way], ...]
    calls: Mapping[Node, _Call]
    inputs: Mapping[Node, Any]
    added: tuple[_Call, ...]
    replacements: tuple[Replacement, ...]

    def images(self, anchor: Node) -> Images | None:
        """The nodes at `anchor` that stand for those of the recipe; None if anything is not the same there."""
        ends = [(end, way.end(anchor)) for end, way in self.ends]
        pending = [(end, there) for end, there in ends if there is not None]
        if len(pending) < len(ends):
            return None
        images: Images = {}
        while pending:
            one, other = pending.pop()
            if one in images:
                if images[one] is not other:
                    return None
                continue
            images[one] = other
            if one in self.inputs:
                if not self._may_stand_for(one, other):
                    return None
            elif not _is_same_call(self.calls[one], other, pending):
                return None
        return images if len(set(images.values())) == len(images) else None

    def _may_stand_for(self, one: Node, other: Node) -> bool:
        is_alike = other.op == one.op and signature(other.meta["val"]) == self.inputs[one]
        return is_alike and constant(one) == constant(other)


def recipe(emit: Emitter, anchor: Node, replacements: Sequence[Replacement]) -> Recipe | None:
    """What was just found at `anchor`, before it is applied; None if it cannot be done again elsewhere."""
    sources = {source for source in emit.sources if _is_floating(source.meta["val"])}
    ends = [(one.old, way) for one in replacements if (way := _way(anchor, one.old)) is not None]
    calls = _behind([end for end, _ in ends], sources)
    if calls is None or len(ends) < len(replacements):
        return None
    inputs = {node: signature(node.meta["val"]) for node in calls if _is_input(node, sources)}
    own = {node: call for node, call in calls.items() if node not in inputs}
    added = _ordered(emit.added, calls)
    if added is None:
        return None
    return Recipe(tuple(ends), own, inputs, added, tuple(replacements))


def replay(emit: Emitter, found: Recipe, images: Images) -> list[Replacement]:
    """Adds the calls of a recipe, on what stands for their operands, and replaces what stands for the old values."""
    there = dict(images)
    for call in found.added:
        args, kwargs = (map_arg(value, lambda node: there.get(node, node)) for value in (call.args, call.kwargs))
        there[call.node] = emit.call(call.target, *args, **kwargs)
    return [Replacement(there[one.old], there[one.new]) for one in found.replacements]


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _behind(ends: list[Node], sources: Set[Node]) -> dict[Node, _Call] | None:
    """Everything that the ends are computed from, sources and graph inputs included but nothing behind them."""
    calls: dict[Node, _Call] = {}
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node in calls:
            continue
        if len(calls) == MOST_NODES:
            return None
        calls[node] = _call(node)
        if not _is_input(node, sources):
            pending += node.all_input_nodes
    return calls


def _is_input(node: Node, sources: Set[Node]) -> bool:
    return node in sources or is_parameter(node)


def _call(node: Node) -> _Call:
    return _Call(node, node.target, args_of(node), node.kwargs)


def _ordered(added: Iterable[Node], calls: Mapping[Node, _Call]) -> tuple[_Call, ...] | None:
    """The added calls and those that were added before and used again, operands first; None if one reads what is
    neither known nor a size."""
    ordered: dict[Node, _Call] = {}

    def visit(node: Node) -> bool:
        if node in calls or node in ordered or isinstance(node.meta["val"], torch.SymInt):
            return True
        if node.op != "call_function" or not all(map(visit, node.all_input_nodes)):
            return False
        ordered[node] = _call(node)
        return True

    return tuple(ordered.values()) if all(map(visit, added)) else None


def _way(anchor: Node, end: Node) -> _Way | None:
    """The shortest one."""
    for neighbours in (_operands, _users):
        places: dict[Node, tuple[int, ...]] = {anchor: ()}
        pending = deque([anchor])
        while pending and end not in places and len(places) < MOST_MET:
            node = pending.popleft()
            ahead = {near: (*places[node], place) for place, near in enumerate(neighbours(node)) if near not in places}
            places.update(ahead)
            pending += ahead
        if end in places:
            return _Way(neighbours, places[end])
    return None


def _operands(node: Node) -> list[Node]:
    return node.all_input_nodes


def _users(node: Node) -> list[Node]:
    return list(node.users)


def _is_same_call(call: _Call, other: Node, pending: list[tuple[Node, Node]]) -> bool:
    """Both call the same with the same arguments, provided that the `pending` pairs of operands are the same."""
    if other.op != "call_function" or call.target is not other.target:
        return False
    return _is_same(call.args, args_of(other), pending) and _is_same(call.kwargs, other.kwargs, pending)


def _is_same(one: Any, other: Any, pending: list[tuple[Node, Node]]) -> bool:
    if isinstance(one, Node) and isinstance(other, Node):
        pending.append((one, other))
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_is_same(*pair, pending) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name], pending) for name in one)
    return bool(one == other)
