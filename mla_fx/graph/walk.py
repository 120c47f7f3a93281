"""One walk through a graph, for whatever follows values to others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Value = TypeVar("Value")


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
