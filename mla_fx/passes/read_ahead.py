"""Reads numbers for the host before a graph runs: a captured graph would repeat those of its first run.

A target names the operators that return such numbers, elements of a tensor [B]. If the graph's inputs determine the
tensor, its elements become inputs, and a function of the other inputs computes it before each call. All numbers of a
graph are copied to the host at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.torch_private import OpOverload, detect_fake_mode, unknown_number
from mla_fx.readings.calls import args_of
from mla_fx.readings.element import computed_from
from mla_fx.readings.sizes import size_of

from .hoist import function_of, is_fixed, key_of, size_without_asking


@dataclass
class Numbers:
    """The numbers that are appended to a graph's inputs: the elements of tensors that the inputs at `sources` give."""

    tensors: list[tuple[GraphModule, list[int]]] = field(default_factory=list)
    count: int = 0

    def summary(self) -> str:
        """A summary for the report; empty if there are none."""
        return f"{self.count} length{'s' * (self.count > 1)} read by the host before each call" if self.count else ""

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            rows = [make(*(given[place] for place in sources)) for make, sources in self.tensors]
        return [*given, *torch.cat(rows).tolist()]

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, which takes the numbers too, as a function of the original inputs."""
        return (lambda *given: compiled(*self.inputs(given))) if self.tensors else compiled


def read_ahead(graph: Graph, operators: Set[str]) -> Numbers:
    """Make the results of the named operators graph inputs, where the other inputs determine them."""
    found, inputs = Numbers(), graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.target._opname in operators]
    if calls:
        _read_sizes_from_inputs(graph)
    keys: dict[Node, int] = {}
    known: dict[Any, int] = {}
    added: dict[int, list[Node]] = {}
    for call in filter(_is_determined, calls):
        values, position = args_of(call)
        key = key_of(values, keys, known)
        if key not in added:
            make, sources = function_of(values)
            found.tensors.append((make, [inputs.index(source) for source in sources]))
            added[key] = _new_inputs(graph, values)
            found.count += len(added[key])
        call.replace_all_uses_with(added[key][position])
        graph.erase_node(call)
    return found


def _read_sizes_from_inputs(graph: Graph) -> None:
    """Replace sizes of computed values by the inputs that hold them."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        held = size_without_asking(graph, size_of(node.meta["val"]))
        if held is not None:
            node.replace_all_uses_with(held)


def _is_determined(call: Node) -> bool:
    """Whether the graph's inputs determine a number, by PyTorch's own operators: a vendor's may be for graphs only."""
    computed = [source for source in computed_from(args_of(call)[0]) if source.op != "placeholder"]
    return all(is_fixed(source) and getattr(source.target, "namespace", "aten") == "aten" for source in computed)


def _new_inputs(graph: Graph, values: Node) -> list[Node]:
    """An input for each element of a tensor. Each has a symbol of its own: equal traces share that of their call."""
    mode, added = detect_fake_mode([values.meta["val"]]), list[Node]()
    for _ in range(values.meta["val"].shape[0]):
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            node = graph.placeholder("length")
        node.target = node.name  # torchair names inputs by the one, and what reads them by the other
        node.meta["val"] = unknown_number(mode)
        added.append(node)
    return added
