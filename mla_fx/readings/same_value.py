"""Whether two elements are one number because equal calls compute them from equal operands.

Model code often looks up its rotary tables inside the rotation, once for the query and once for the key: two values of
the graph, which are equal. Only calls that always give the same result for the same operands count. Random and
uninitialised values equal only themselves. Graphs are functional here, so nothing is written between two calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .calls import args_of, options_of
from .element import Element

MOST_CALLS = 50  # compared for one pair of values
REPEATABLE = frozenset({"npu.npu_dynamic_quant.default"})  # of other libraries
UNLIKE = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise})

_Pairs = set[tuple[Node, Node]]


def same_value(one: Element, other: Element) -> bool:
    """Whether both elements have the same factor, casts and index, and come from one value or from two equal ones."""
    if (one.factor, one.index, one.roundings) != (other.factor, other.index, other.roundings):
        return False
    return equal_calls(one.origin, other.origin)


def equal_calls(one: Node, other: Node) -> bool:
    """Whether two nodes have equal values: they are one node, or equal calls."""
    return _same(one, other, set())


def _same(one: Any, other: Any, compared: _Pairs) -> bool:
    """Whether two arguments are equal. `compared` are the pairs of calls met before: a difference ends it all."""
    if isinstance(one, Node):
        return one is other or (isinstance(other, Node) and _same_call(one, other, compared))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(mine, theirs, compared) for mine, theirs in pairs)
    return repr(one) == repr(other)  # 0.0 and -0.0 are not the same number, NaN and NaN are


def _same_call(one: Node, other: Node, compared: _Pairs) -> bool:
    if (one, other) in compared:
        return True
    if one.op != "call_function" or other.op != "call_function" or one.target is not other.target:
        return False
    if len(compared) == MOST_CALLS or not _is_repeatable(one.target):
        return False
    compared.add((one, other))
    mine, theirs = options_of(one), options_of(other)
    if list(mine) != list(theirs) or not _same(list(mine.values()), list(theirs.values()), compared):
        return False
    return _same(args_of(one), args_of(other), compared)


def _is_repeatable(target: Any) -> bool:
    """Whether equal operands always give equal results. Little is known about operators that are not PyTorch's."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if target.namespace not in ("aten", "prims"):
        return str(target) in REPEATABLE
    is_empty = "empty" in target._schema.name
    return not is_empty and not target._schema.is_mutable and UNLIKE.isdisjoint(target.tags)
