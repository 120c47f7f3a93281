"""Taking a graph back to what it was, and putting its nodes in order."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node


class Snapshot:
    """A graph as it is now, to be rebuilt if a pass fails; taking one costs next to nothing."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [(node, node.args, node.kwargs) for node in graph.nodes]
        self.unused = {node for node in graph.nodes if not node.users}
        self.owner = graph.owning_module

    def restore(self) -> Graph:
        """A new graph, node for node what was there."""
        graph = Graph(owning_module=self.owner)
        copies: dict[Node, Node] = {}
        for node, args, kwargs in self.nodes:
            args, kwargs = (torch.fx.map_arg(value, copies.__getitem__) for value in (args, kwargs))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copies[node].meta = dict(node.meta)
        return graph


def erase_orphans(graph: Graph, before: Snapshot) -> None:
    """Removes what lost its last user since `before`, or was added and has none. What never had a user was there for
    its effect, or for nothing, and is the user's."""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and node not in before.unused and not _writes(node):
            graph.erase_node(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def sort_nodes(graph: Graph) -> None:
    """Moves nodes that stand before one of their operands behind it; all others keep their order."""
    placed: set[Node] = set()
    last: Node | None = None
    for root in list(graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [operand for operand in node.all_input_nodes if operand not in placed]
            if node in placed or not waiting:
                stack.pop()
                if node not in placed:
                    placed.add(node)
                    if last is not None and last.next is not node:
                        last.append(node)
                    last = node
                continue
            if any(operand in stack for operand in waiting):
                raise RuntimeError(f"the rewritten graph has a cycle through {node.name}")
            stack += waiting
