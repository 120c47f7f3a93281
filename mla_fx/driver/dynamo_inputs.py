"""Changes to Dynamo's graph before AOTAutograd: floats that `dynamic=True` turned into inputs become numbers again, and
the names of inputs, which AOTAutograd only numbers, are kept."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.provenance import INPUT_NAME, plain_path
from mla_fx.graph.torch_compilers import input_path
from mla_fx.passes.triage import may_attend, read_by_products

FROM_BEFORE = "from before a graph break"


def recover_floats(gm: GraphModule) -> None:
    """Turn epsilons and softmax scales that Dynamo lifted to 0-d inputs into numbers again, under a guard.

    Only if the graph may contain attention, and those alone that enter a product: a temperature of logits may be
    another at each call. Then a new shape recompiles nothing, and a new number recompiles once. If anything fails, the
    graph is unchanged."""
    if not any(map(_is_lifted_float, gm.graph.nodes)) or not may_attend(gm.graph):
        return
    read = read_by_products(gm.graph)
    items = [node for node in gm.graph.nodes if _is_lifted_float(node) and node in read]
    numbers = {node: node.meta["example_value"].node.guard_float(__file__, 0) for node in items}
    for node, number in numbers.items():
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
    gm.recompile()


def _is_lifted_float(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op == "call_method" and node.target == "item" and isinstance(value, torch.SymFloat)


def input_names(graph: Graph) -> tuple[str, ...]:
    """The names of Dynamo's inputs as the user writes them, `layers.3.self_attn.o_proj.weight`; empty if unknown."""
    paths = (plain_path(input_path(node)) for node in graph.find_nodes(op="placeholder"))
    return tuple(FROM_BEFORE if path.startswith("___stack") else path for path in paths)


def name_inputs(graph: Graph, names: tuple[str, ...]) -> None:
    """Let messages call the inputs of an operator graph by these names, if each input has one."""
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(names):
        return
    for node, name in zip(inputs, names, strict=True):
        if name:
            node.meta[INPUT_NAME] = name
