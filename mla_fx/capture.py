"""What must be done on Dynamo's graph, before AOTAutograd: floats that `dynamic=True` turned into inputs."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .survey import joins_cut_products


def recover_floats(gm: GraphModule) -> None:
    """Makes epsilons and softmax scales numbers again where Dynamo lifted them to 0-d inputs, under a guard.

    Only where the graph may hold MLA: a piece cut out of one product that enters another. A shape change then
    recompiles nothing, a changed number exactly once. If anything fails, the graph is as it was."""
    items = [node for node in gm.graph.nodes if _is_lifted_float(node)]
    if not items or not joins_cut_products(gm.graph):
        return
    numbers = {node: node.meta["example_value"].node.guard_float(__file__, 0) for node in items}
    for node, number in numbers.items():
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
    gm.recompile()


def _is_lifted_float(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op == "call_method" and node.target == "item" and isinstance(value, torch.SymFloat)
