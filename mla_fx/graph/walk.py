"""Walks through a graph: to what values are computed from, and to dead code, which is removed; in-place writes stay."""

import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import TypeVar

from torch.fx import Node

from .schemas import written

Value = TypeVar("Value")
FEW = 30  # calls


def nearest_first(
    first: Iterable[Value], further: Callable[[Value], Iterable[Value]], is_end: Callable[[Value], bool]
) -> Iterator[Value]:
    """Some values and all that `further` leads to: ends are among them, but nothing behind an end."""
    pending, seen = deque(first), set[Value]()
    while pending:
        value = pending.popleft()
        if value not in seen:
            seen.add(value)
            yield value
            pending += () if is_end(value) else further(value)


def behind(values: Iterable[Node], stops: Container[object] = ()) -> Iterator[Node]:
    """Values and all that they are computed from, nearest first; what a stop is computed from is not among it."""
    return nearest_first(values, lambda node: node.all_input_nodes, stops.__contains__)


def few_behind(node: Node, stops: Container[object] = ()) -> list[Node]:
    """The nearest calls behind a value, without stops; at most `FEW`."""
    found = (one for one in behind(node.all_input_nodes, stops) if one.op == "call_function" and one not in stops)
    return [*itertools.islice(found, FEW)]


def unread_without(values: Iterable[Node]) -> set[Node]:
    """The values that are unread once these values are unread, including these."""
    unread = {value for value in values if not written(value)}
    pending = list(unread)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node in unread or node.op != "call_function" or not unread.issuperset(node.users):
                continue
            if not written(node):
                unread.add(node)
                pending.append(node)
    return unread


def erase_unread(values: Iterable[Node]) -> list[Node]:
    """Erase values and everything that only they read; return what was erased, in order."""
    pending, erased = sorted(values), []
    while pending:
        node = pending.pop()
        if node._erased or node.users or node.op != "call_function" or written(node):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.append(node)
    return sorted(erased)
