"""Taking a graph back to what it was, and clearing away what a rewrite left."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .aliasing import written


class Snapshot:
    """A graph as it is now, to be rebuilt if a pass fails; taking one costs next to nothing."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = [(node, node.args, node.kwargs, dict(node.meta)) for node in graph.nodes]
        self.known = {node for node, *_ in self.nodes}
        self.unused = {node for node in self.known if not node.users}
        self.owner = graph.owning_module

    def restore(self) -> Graph:
        """A new graph, node for node what was there."""
        graph = Graph(owning_module=self.owner)
        copies: dict[Node, Node] = {}
        for node, args, kwargs, meta in self.nodes:
            args, kwargs = (torch.fx.map_arg(value, copies.__getitem__) for value in (args, kwargs))
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copies[node].meta = dict(meta)
        return graph


def erase_orphans(graph: Graph, before: Snapshot) -> None:
    """Removes what lost its last user since `before`, or was added and has none. What never had a user was there for
    its effect, or for nothing, and is the user's."""
    for node in reversed(graph.nodes):
        if not node.users and node.op == "call_function" and node not in before.unused and not written(node):
            graph.erase_node(node)
