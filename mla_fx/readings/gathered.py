"""Values that the processes of a group gather: each process computes a part, and attention takes all parts."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .calls import operands_of
from .views import MOVERS

aten = torch.ops.aten

SPLITS = frozenset({operator.getitem, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default})
JOINS = frozenset({*MOVERS, *SPLITS, aten.cat.default})
GATHERS = ("wait_tensor", "all_gather_into_tensor")  # by name: not every build of PyTorch has collectives
MOST_STEPS = 20


def own_part(value: Node) -> Node:
    """The part of this process if `value` has those of a group, else the value itself.

    This finds where the part is computed, and not how the parts are joined. To replace it by an equal value, no more is
    needed."""
    node = value
    for _ in range(MOST_STEPS):
        if node.target not in JOINS or not (operands := operands_of(node)):
            break
        node = operands[0]
    for name in GATHERS:
        if not isinstance(node.target, OpOverload) or node.target._opname != name:
            return value
        node = operands_of(node)[0]
    return node
