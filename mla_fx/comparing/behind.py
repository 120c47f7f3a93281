"""What values are computed from."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator

from torch.fx import Node

from mla_fx.graph.walk import nearest_first

FEW = 30  # calls


def behind(values: Iterable[Node], stops: Container[object] = ()) -> Iterator[Node]:
    """Values and all that they are computed from, nearest first; what a stop is computed from is not among it."""
    return nearest_first(values, lambda node: node.all_input_nodes, stops.__contains__)


def few_behind(node: Node, stops: Container[object] = ()) -> list[Node]:
    """The nearest calls behind a value, without stops; at most `FEW`."""
    found = (one for one in behind(node.all_input_nodes, stops) if one.op == "call_function" and one not in stops)
    return [*itertools.islice(found, FEW)]
