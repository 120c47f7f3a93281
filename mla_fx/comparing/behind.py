"""What values are computed from."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Iterable, Iterator

from torch.fx import Node

FEW = 30  # calls


def behind(values: Iterable[Node], stops: Container[object] = ()) -> Iterator[Node]:
    """Values and all that they are computed from, nearest first; what a stop is computed from is not among it."""
    pending = deque(dict.fromkeys(values))
    seen = {*pending}
    while pending:
        node = pending.popleft()
        yield node
        new = [] if node in stops else [one for one in node.all_input_nodes if one not in seen]
        seen.update(new)
        pending += new


def few_behind(node: Node, stops: Container[object] = ()) -> list[Node]:
    """The nearest calls behind a value, without stops; at most `FEW`."""
    found = (one for one in behind(node.all_input_nodes, stops) if one.op == "call_function" and one not in stops)
    return [*itertools.islice(found, FEW)]
