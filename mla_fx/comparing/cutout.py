"""A part of a graph as a graph of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.aliasing import written

from .behind import behind


@dataclass(frozen=True)
class Cutout:
    """Values of a module's graph, computed from others, which are inputs under the given names."""

    owner: GraphModule
    results: Sequence[Node]
    names: Mapping[Node, str]

    @functools.cached_property
    def inputs(self) -> dict[Node, str]:
        """The inputs that are needed, and their names."""
        return {node: self.names[node] for node in self.owner.graph.nodes if node in self._needed & self.names.keys()}

    @functools.cached_property
    def module(self) -> GraphModule:
        """The part as a graph. Results that write an input are in it, but are not returned."""
        graph = Graph()
        copies = {node: graph.placeholder(name) for node, name in self.inputs.items()}
        for node in self.owner.graph.nodes:
            if node in self._needed and node not in copies:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in self.results if not written(node)))
        return GraphModule({}, graph)

    @functools.cached_property
    def _needed(self) -> Set[Node]:
        return {*behind(self.results, self.names)}


def whole(owner: GraphModule, results: Sequence[Node]) -> Cutout:
    return Cutout(owner, results, given(owner))


def given(owner: GraphModule) -> dict[Node, str]:
    """The inputs and the attributes of a graph, and their names."""
    return {node: node.name for node in owner.graph.nodes if node.op in ("placeholder", "get_attr")}
