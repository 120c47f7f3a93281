"""Repeats a rewrite found at one anchor wherever the graph is the same, without matching again.

A rule knows a graph only through the calls whose arguments it read; the readings record these calls. If the same calls,
each with a result of the same signature, lead to the replaced values at another anchor, the rule would find the same
match there. The same calls then replace these values, and nothing is read again. Of the values behind calls that the
rule did not look into, it knows only kind, shape and dtype. Anything not provably the same is matched anew.

The check that no input is lost may look further than the rule did. What it looked at is compared, too. The other
conditions are checked at each anchor: the layout of the replaced values, which depends on their readers, and what the
target accepts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from mla_fx.graph.walk import nearest_first
from mla_fx.readings.constant import constant
from mla_fx.readings.element import is_parameter
from mla_fx.rewriting.draft import Change, Draft, is_value
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.fake_values import FakeValues

MOST_NODES = 1000  # calls behind the replaced values; a larger match is not recorded
MOST_MET = 100  # nodes looked at on the way from an anchor to a replaced value

Images = dict[Node, Node]  # each node at the first anchor -> the corresponding node at the second


class _Call(NamedTuple):
    """A copy of a call, because a replaced node soon loses its arguments: how they are nested, and their leaves."""

    target: Any
    nesting: Any
    leaves: list[Any]
    signature: Any  # of the result

    @classmethod
    def of(cls, node: Node, signature: Any = None) -> _Call:
        leaves: list[Any] = []
        nesting = map_aggregate((node.args, node.kwargs), leaves.append)
        return cls(node.target, nesting, leaves, signature)


class _Way(NamedTuple):
    """A path from one node to another through operands or through users: the index of the next one at each step."""

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
    """What a rewrite read, and what replaces it.

    `ends` are the replaced values and the paths to them from the anchor. `calls` are the calls behind them: those that
    the rule looked into, and their `inputs`. `sources` are the operations from which operands were read."""

    ends: tuple[tuple[Node, _Way], ...]
    calls: Mapping[Node, _Call]
    inputs: Set[Node]
    sources: Set[Node]
    added: tuple[tuple[Node | Draft, Draft], ...]
    replacements: tuple[tuple[Node, Draft | Node], ...]
    differs: bool

    def images(self, anchor: Node, fakes: FakeValues) -> Images | None:
        """The nodes at `anchor` that correspond to those of the recipe; None if anything differs there."""
        ends = [(end, way.end(anchor)) for end, way in self.ends]
        pending = [(end, there) for end, there in ends if there is not None]
        if len(pending) < len(ends):
            return None
        images: Images = {}
        while pending:
            one, other = pending.pop()
            known = images.get(one)
            if known is other:
                continue
            if known is not None:
                return None
            images[one] = other
            call = self.calls[one]
            if other.op != one.op or fakes.signature(other) != call.signature:
                return None
            if one in self.inputs:
                if not _may_stand_for(one, other):
                    return None
            elif not _is_same_call(call, other, pending):
                return None
        return images if len(set(images.values())) == len(images) else None


def _may_stand_for(one: Node, other: Node) -> bool:
    if "val" not in one.meta:
        return one is other  # a module that the graph calls
    return constant(one) == constant(other)


def recipe(emit: Emitter, anchor: Node, looked_into: Set[Node], plan: Change) -> Recipe | None:
    """The recipe of the rewrite found at `anchor`, taken before it is applied; None if it cannot be repeated elsewhere.

    `looked_into` are the nodes that the rule and the check for lost inputs looked at."""
    ends = [(old, way) for old in plan.olds if (way := _way(anchor, old)) is not None]
    calls = _behind([end for end, _ in ends], looked_into, emit.fakes)
    if calls is None or len(ends) < len(plan.olds) or any(_is_input(old, looked_into) for old in plan.olds):
        return None
    inputs = {node for node in calls if _is_input(node, looked_into)}
    added = _added(emit, plan, calls)
    if added is None:
        return None
    sources = plan.sources & calls.keys()
    return Recipe(tuple(ends), calls, inputs, sources, added, plan.replacements, plan.differs)


def replay(emit: Emitter, found: Recipe, images: Images) -> Change:
    """Draft the calls of a recipe with the images of their operands, to replace the images of the old values."""
    there: dict[Any, Any] = dict(images)

    def image(leaf: Any) -> Any:
        return there.get(leaf, leaf) if is_value(leaf) else leaf

    for part, call in found.added:
        args, kwargs = map_aggregate((call.args, call.kwargs), image)
        there[part] = emit.again(call, args, kwargs)
    sources = {images[source] for source in found.sources}
    return Change.of([(images[old], image(new)) for old, new in found.replacements], sources, differs=found.differs)


def _behind(ends: list[Node], looked_into: Set[Node], fakes: FakeValues) -> dict[Node, _Call] | None:
    """The calls behind the ends that the rule looked into, and their operands; None if there are too many."""
    found = nearest_first(ends, _operands, lambda node: _is_input(node, looked_into))
    calls = {node: _Call.of(node, fakes.signature(node)) for node in itertools.islice(found, MOST_NODES + 1)}
    return calls if len(calls) <= MOST_NODES else None


def _is_input(node: Node, looked_into: Set[Node]) -> bool:
    return node not in looked_into or is_parameter(node)


def _added(
    emit: Emitter, plan: Change, calls: Mapping[Node, _Call]
) -> tuple[tuple[Node | Draft, Draft], ...] | None:
    """The calls of a plan and the earlier added calls that it reuses, operands first.

    None if one reads a node that is neither among the known calls nor a size."""
    ordered: dict[Node | Draft, Draft] = {}

    def visit(part: Node | Draft) -> bool:
        is_known = part in ordered or part in calls
        if is_known or (isinstance(part, Node) and isinstance(part.meta["val"], torch.SymInt)):
            return True
        draft = part if isinstance(part, Draft) else emit.draft_of(part)
        if draft is None or not all(map(visit, draft.operands)):
            return False
        ordered[part] = draft
        return True

    return tuple(ordered.items()) if all(visit(new) for _, new in plan.replacements) else None


def _way(anchor: Node, end: Node) -> _Way | None:
    """The shortest path from `anchor` to `end`, through operands if there is one, else through users."""
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
    """Whether both are the same call, provided that the pairs of operands added to `pending` correspond."""
    if call.target is not other.target:
        return False
    _, nesting, leaves, _ = _Call.of(other)
    if call.nesting != nesting:
        return False
    for one, another in zip(call.leaves, leaves, strict=True):
        if type(one) is not type(another):
            return False
        if isinstance(one, Node):
            pending.append((one, another))
        elif one != another:
            return False
    return True
