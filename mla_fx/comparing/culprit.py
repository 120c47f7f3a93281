"""Finds which fused call a difference comes from, and cuts a part out of a graph, as a graph of its own."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.provenance import RULE, STANDS_FOR, fused_name, module_of, source_of
from mla_fx.graph.schemas import written
from mla_fx.graph.walk import behind

from .closeness import distance
from .exact import moves

MOST_NAMED = 4


@dataclass(frozen=True)
class Culprit:
    """The first replaced value that differs: `new` in the fused graph, in place of `old`. `agreeing` are the earlier
    ones that do not, and what each replaces."""

    unfused: GraphModule
    fused: GraphModule
    new: Node
    old: Node
    error: float
    agreeing: Mapping[Node, Node]

    def __str__(self) -> str:
        computed = _behind(self.new, self.agreeing)
        rules = dict.fromkeys(rule for one in computed if (rule := one.meta.get(RULE)))
        source = f" ({source_of(self.old)})" if source_of(self.old) else ""
        return (
            f"The first value to differ, by {self.error:.3g}, replaces {self.old}{source}; it is computed by "
            f"{listed(computed)}, added by {', '.join(rules)}"
        )

    def parts(self) -> tuple[Cutout, Cutout]:
        """What computes the value in the unfused and in the fused graph, from values that both have."""
        originals = {node.name: node for node in self.unfused.graph.nodes}
        has_data = _with_data(self.unfused.graph.nodes)
        shared = dict[Node, Node]()
        for node in behind([self.new]):
            old = self.agreeing.get(node, originals.get(node.name))
            if node is not self.new and old not in (None, self.old) and _is_cut(old, has_data):
                shared[node] = old
        fused = Cutout(self.fused, [self.new], {node: old.name for node, old in shared.items()})
        names = {shared[node]: name for node, name in fused.inputs.items()}
        return Cutout(self.unfused, [self.old], {**given(self.unfused), **names}), fused


def find(unfused: GraphModule, fused: GraphModule, values: Any, limit: float) -> Culprit | None:
    """The first replaced value that differs. `values` returns those of given nodes of a graph by their names."""
    pairs = _pairs(unfused, fused)
    theirs = values(unfused, {old.name for old in pairs.values()})
    ours = values(fused, {node.name for node in pairs})
    agreeing: dict[Node, Node] = {}
    for node, old in pairs.items():
        error = distance(ours[node.name], theirs[old.name])
        if not error <= limit:
            return Culprit(unfused, fused, node, old, error, agreeing)
        agreeing[node] = old
    return None


def _pairs(unfused: GraphModule, fused: GraphModule) -> dict[Node, Node]:
    """The values that replace others, and what they replace."""
    originals = {node.name: node for node in unfused.graph.nodes}
    marked = [(node, node.meta.get(STANDS_FOR)) for node in fused.graph.nodes]
    return {node: originals[old] for node, old in marked if old in originals}


def listed(nodes: Iterable[Node]) -> str:
    """The fused operators among some nodes, and their modules."""
    calls = [(name, module_of(node)) for node in nodes if (name := fused_name(node))]
    names = [f"{name} in {module}" if module else name for name, module in calls]
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join(names[:MOST_NAMED] + more)


def _behind(node: Node, agreeing: Collection[Node]) -> list[Node]:
    """A value and what it is computed from, in the same module, except for what is behind agreeing values."""
    module, pending, found = module_of(node), [node], dict[Node, None]()
    while pending:
        one = pending.pop()
        if one not in agreeing and one not in found and module_of(one) in (module, ""):
            found[one] = None
            pending += one.all_input_nodes
    return [*found]


def _is_cut(node: Node, has_data: Collection[Node]) -> bool:
    """Whether random numbers may take the place of a value: nothing is known about it but its layout.

    Views are not, because another view of the same value would get other numbers; nor are masks and positions, which
    belong together."""
    if node.op != "call_function":
        return True
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not moves(node) and node in has_data


def _with_data(nodes: Iterable[Node]) -> set[Node]:
    """The floating values that depend on a floating input, and the groups of values that hold some."""
    found: set[Node] = set()
    for node in nodes:
        value = node.meta.get("val")
        is_whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        if not is_whole and (node.op == "placeholder" or any(one in found for one in node.all_input_nodes)):
            found.add(node)
    return found


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
