"""Sizes of written graph inputs, read from the graph inputs that hold these numbers.

torchair reads a symbol from the first tensor of that size, and keeps the copy that a cache is written through if
anything else reads the cache, be it for its size alone."""

import functools
import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.schemas import owner
from mla_fx.graph.walk import erase_unread
from mla_fx.readings.sizes import Size, size_of

COPY = torch.ops.aten.copy_.default


def read(gm: GraphModule) -> None:
    """Replace sizes of written inputs, and of their views, by numbers; views that were read for nothing else go."""
    graph = gm.graph
    written = {copy.args[0] for copy in graph.find_nodes(op="call_function", target=COPY)}
    numbers = _numbers(graph)
    for node in [node for node in graph.nodes if getattr(node.target, "__name__", "").startswith("sym_size")]:
        source, axis = node.args
        if owner(source) not in written:
            continue
        factors = _factors(size_of(source.meta["val"].shape[axis]), numbers)
        if None not in factors:
            with graph.inserting_before(node):
                node.replace_all_uses_with(functools.reduce(functools.partial(_times, graph), factors))
            erase_unread([node])
    gm.recompile()


def _numbers(graph: Graph) -> dict[Size, Node]:
    inputs = graph.find_nodes(op="placeholder")
    return {size_of(node.meta["val"]): node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)}


def _factors(size: Size, numbers: dict[Size, Node]) -> list[Node | int | None]:
    """What the size is a product of; None for a factor that no graph input holds."""
    if isinstance(size, int):
        return [size]
    parts = [size] if size in numbers else sympy.Mul.make_args(size)
    return [int(part) if part.is_Integer else numbers.get(part) for part in parts]


def _times(graph: Graph, left: Any, right: Any) -> Node:
    node = graph.call_function(operator.mul, (left, right))
    values = [factor.meta["val"] if isinstance(factor, Node) else factor for factor in (left, right)]
    node.meta["val"] = values[0] * values[1]
    return node
