"""What must be done on Dynamo's graph, before AOTAutograd: floats that `dynamic=True` turned into inputs."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from .canonical.views import args_of

_PROJECTIONS = frozenset({torch.nn.functional.linear, torch.matmul, torch.bmm, torch.mm, "matmul", "mm", "bmm"})
_STEPS_BACK = 16


def recover_floats(gm: GraphModule) -> None:
    """Makes epsilons and softmax scales numbers again where Dynamo lifted them to 0-d inputs, under a guard.

    Only where the graph may hold MLA: a value that was cut out of one projection and, through a few small operations,
    enters another. A shape change then recompiles nothing, a changed number exactly once."""
    items = [node for node in gm.graph.nodes if _is_lifted_float(node)]
    if not items or not _has_bottleneck(gm.graph):
        return
    for node in items:
        value = node.meta["example_value"].node.guard_float(__file__, 0)
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    gm.recompile()


def _is_lifted_float(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op == "call_method" and node.target == "item" and isinstance(value, torch.SymFloat)


def _has_bottleneck(graph: Graph) -> bool:
    """A projection whose input is a normalised or cut part of another projection's output."""
    return any(_comes_from_projection(node) for node in graph.nodes if _is_projection(node))


def _is_projection(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in _PROJECTIONS


def _comes_from_projection(projection: Node) -> bool:
    node, width = args_of(projection)[0], None
    for _ in range(_STEPS_BACK):
        if not isinstance(node, Node) or node.op == "placeholder":
            return False
        if _is_projection(node):
            return width is not None
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
            width = node
        operands = [value for value in node.all_input_nodes if value.op != "placeholder"]
        if not operands:
            return False
        node = operands[0]
    return False
