"""Values that the program bounds by numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .calls import args_of, argument
from .constant import constant

aten = torch.ops.aten
BOTH, LOW, HIGH = (1, 2), (1, None), (None, 1)  # the places of the lower and the upper bound among the arguments
EITHER_ORDER = frozenset({aten.maximum.default, aten.minimum.default})
BY_NUMBERS: dict[Any, tuple[int | None, int | None]] = {
    aten.clamp.default: BOTH,
    aten.clamp_min.default: LOW,
    aten.clamp_max.default: HIGH,
    aten.maximum.default: LOW,
    aten.minimum.default: HIGH,
}


class Bounds(NamedTuple):
    """Numbers below `low` become `low`, then numbers above `high` become `high`."""

    low: float = -math.inf
    high: float = math.inf


def bounded(node: Node) -> tuple[Node, Bounds] | None:
    """What a call bounds by numbers; None if it does not."""
    if node.target not in BY_NUMBERS:
        return None
    value = args_of(node)[0]
    limits = [None if place is None else argument(node, place) for place in BY_NUMBERS[node.target]]
    if node.target in EITHER_ORDER and constant(value) is not None:
        limits = [None if limit is None else value for limit in limits]
        value = args_of(node)[1]
    low, high = (none if limit is None else constant(limit) for limit, none in zip(limits, Bounds(), strict=True))
    return None if low is None or high is None else (value, Bounds(low, high))
