"""Reads numbers for the host before a graph runs: a captured graph would repeat those of its first run.

A target names the operators that return such numbers, elements of a tensor [B]. If the graph's inputs determine the
tensor, its elements become inputs, and a function of the other inputs computes it before each call. All numbers of a
graph are copied to the host at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload, detect_fake_mode, unknown_number
from mla_fx.readings.calls import args_of
from mla_fx.readings.element import computed_from
from mla_fx.rewriting.draft import Change, Draft
from mla_fx.rewriting.emitter import Apply, Emitter

from .hoist import function_of, is_fixed, key_of, sizes_of_inputs


@dataclass
class HostNumbers:
    """The numbers that are appended to a graph's inputs: those at `places` among the elements of all tensors. The
    inputs at `sources` give each tensor."""

    tensors: list[tuple[GraphModule, list[int]]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.places)

    def summary(self) -> str:
        """A summary for the report; empty if there are none."""
        return f"{self.count} length{'s' * (self.count > 1)} read by the host before each call" if self.count else ""

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            rows = [make(*(given[place] for place in sources)) for make, sources in self.tensors]
        numbers = torch.cat(rows).tolist()
        return [*given, *(numbers[place] for place in self.places)]

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compiled`, which takes the numbers too, as a function of the original inputs."""
        return (lambda *given: compiled(*self.inputs(given))) if self.tensors else compiled


def read_ahead(graph: Graph, operators: Set[str], apply: Apply) -> HostNumbers:
    """Make the results of the named operators graph inputs, where the other inputs determine them. A result whose plan
    is refused is computed at each call."""
    emit, found, inputs = Emitter(graph), HostNumbers(), graph.find_nodes(op="placeholder")
    calls = [node for node in graph.nodes if isinstance(node.target, OpOverload) and node.target._opname in operators]
    for plan in sizes_of_inputs(graph.nodes) if calls else ():
        with contextlib.suppress(NoMatch):
            apply(emit, "reading ahead", plan)
    keys: dict[Node, int] = {}
    known: dict[Any, int] = {}
    starts: dict[int, int] = {}  # of each tensor among all elements
    elements, added = 0, dict[int, Draft]()
    for call in filter(_is_determined, calls):
        values, position = args_of(call)
        key = key_of(values, keys, known)
        if key not in starts:
            make, sources = function_of(values)
            found.tensors.append((make, [inputs.index(source) for source in sources]))
            starts[key], elements = elements, elements + int(values.meta["val"].shape[0])
        place = starts[key] + position
        number = added.get(place) or _input(call)
        with contextlib.suppress(NoMatch):
            apply(emit, "reading ahead", Change.of([(call, number)], {values}))
            if place not in added:
                added[place] = number
                found.places.append(place)
    return found


def _is_determined(call: Node) -> bool:
    """Whether the graph's inputs determine a number, by PyTorch's own operators: a vendor's may be for graphs only."""
    computed = [source for source in computed_from(args_of(call)[0]) if source.op != "placeholder"]
    return all(is_fixed(source) and getattr(source.target, "namespace", "aten") == "aten" for source in computed)


def _input(call: Node) -> Draft:
    """A number as a graph input. Each has a symbol of its own: equal traces share that of their call."""
    meta = {"val": unknown_number(detect_fake_mode([args_of(call)[0].meta["val"]]))}
    return Draft(call.target, call.args, call.kwargs, call.meta["val"], "length", meta, is_input=True)
