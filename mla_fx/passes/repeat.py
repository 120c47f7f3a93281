"""A rewrite that was found in one place, done again where the graph is the same.

What a rule knows of a graph are the calls whose arguments it asked for, which readings note as they are asked. Where
the same calls lead to the values that are replaced, call for call and each with a result of the same kind, the rule
would find the same; so the same calls replace them, and nothing need be read again. Of what lies behind calls that
nobody looked into it knows no more than kind, shape and type. What is not surely the same is matched anew.

Whatever else decides is asked at each place: the layout of what is replaced, which its readers decide, what the target
says, and whether all that enters a value still does, where that was found by looking further than the rule did."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from mla_fx.readings.element import constant, is_parameter
from mla_fx.rewriting.draft import Draft, is_value
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.fake_values import FakeValues
from mla_fx.rewriting.replacement import Drafted

MOST_NODES = 1000  # behind the replaced values; a larger part of a graph is not kept
MOST_MET = 100  # nodes looked at on the way from an anchor to a replaced value

Images = dict[Node, Node]  # for each node at the first place, the one that corresponds to it at the second


class _Call(NamedTuple):
    """A call as it was when it was met: what is replaced soon loses its arguments."""

    node: Node
    target: Any
    args: Any
    kwargs: Any
    signature: Any  # of the result


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

    `ends` are the values that are replaced, and the ways to them from the anchor. `calls` lie behind them: those that
    were looked into, and the `inputs` of these. `sources` are the operations from which operands were read.
    `is_closed` says that nothing is lost wherever these calls are the same."""

    ends: tuple[tuple[Node, _Way], ...]
    calls: Mapping[Node, _Call]
    inputs: Set[Node]
    sources: Set[Node]
    added: tuple[tuple[Node | Draft, Draft], ...]
    replaced: tuple[tuple[Node, Draft | Node], ...]
    is_closed: bool

    def images(self, anchor: Node, fakes: FakeValues) -> Images | None:
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


def recipe(
    emit: Emitter, anchor: Node, looked_into: Set[Node], plan: Drafted, checked: Set[Node]
) -> Recipe | None:
    """What was just found at `anchor`, before it is applied; None if it cannot be done again elsewhere. That nothing is
    lost was found by looking at the `checked` nodes."""
    ends = [(old, way) for old in plan.olds if (way := _way(anchor, old)) is not None]
    calls = _behind([end for end, _ in ends], looked_into, emit.fakes)
    if calls is None or len(ends) < len(plan.olds) or any(_is_input(old, looked_into) for old in plan.olds):
        return None
    inputs = {node for node in calls if _is_input(node, looked_into)}
    added = _added(emit, plan, calls)
    if added is None:
        return None
    sources, is_closed = plan.sources & calls.keys(), checked <= calls.keys() - inputs
    return Recipe(tuple(ends), calls, inputs, sources, added, plan.replaced, is_closed)


def replay(emit: Emitter, found: Recipe, images: Images) -> Drafted:
    """The calls of a recipe on what stands for their operands, in the place of what stands for the old values."""
    there: dict[Any, Any] = dict(images)

    def image(leaf: Any) -> Any:
        return there.get(leaf, leaf) if is_value(leaf) else leaf

    for part, call in found.added:
        args, kwargs = map_aggregate((call.args, call.kwargs), image)
        there[part] = emit.drafted(call.target, *args, **kwargs)
    sources = {images[source] for source in found.sources}
    return Drafted.of([(images[old], image(new)) for old, new in found.replaced], sources)


def _behind(ends: list[Node], looked_into: Set[Node], fakes: FakeValues) -> dict[Node, _Call] | None:
    """The calls looked into behind the ends, and their operands; None if these are too many."""
    calls: dict[Node, _Call] = {}
    pending = list(ends)
    while pending:
        node = pending.pop()
        if node in calls:
            continue
        if len(calls) == MOST_NODES:
            return None
        calls[node] = _call(node, fakes)
        if not _is_input(node, looked_into):
            pending += node.all_input_nodes
    return calls


def _is_input(node: Node, looked_into: Set[Node]) -> bool:
    return node not in looked_into or is_parameter(node)


def _call(node: Node, fakes: FakeValues) -> _Call:
    return _Call(node, node.target, node.args, node.kwargs, fakes.signature(node))


def _added(
    emit: Emitter, plan: Drafted, calls: Mapping[Node, _Call]
) -> tuple[tuple[Node | Draft, Draft], ...] | None:
    """The calls of a plan and those that were added before and are used again, operands first; None if one reads what
    is neither known nor a size."""
    ordered: dict[Node | Draft, Draft] = {}

    def visit(part: Node | Draft) -> bool:
        if part in ordered or (isinstance(part, Node) and (part in calls or _is_size(part))):
            return True
        draft = part if isinstance(part, Draft) else emit.draft_of(part)
        if draft is None or not all(map(visit, draft.operands)):
            return False
        ordered[part] = draft
        return True

    return tuple(ordered.items()) if all(visit(new) for _, new in plan.replaced) else None


def _is_size(node: Node) -> bool:
    return isinstance(node.meta["val"], torch.SymInt)


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
    if call.target is not other.target:
        return False
    mine: list[Any] = []
    theirs: list[Any] = []
    nesting = map_aggregate((call.args, call.kwargs), mine.append)
    if nesting != map_aggregate((other.args, other.kwargs), theirs.append):
        return False
    for one, another in zip(mine, theirs, strict=True):
        if type(one) is not type(another):
            return False
        if isinstance(one, Node):
            pending.append((one, another))
        elif one != another:
            return False
    return True
