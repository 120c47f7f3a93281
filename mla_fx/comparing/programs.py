"""What a plan computes, and what it replaces, as two graphs of the small sizes at which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule

from .interpreter import Interpreter
from .plans import Difference
from .whole_numbers import Part


class Programs(NamedTuple):
    """Two functions of the same inputs."""

    unfused: GraphModule
    fused: GraphModule
    inputs: Mapping[str, Any]


def programs(found: Difference) -> Programs:
    inputs = {str(leaf.name): found.run.values[leaf] for leaf in found.run.leaves}
    return Programs(_Writer(found.run).program(found.old), _Writer(found.run).program(found.new), inputs)


class _Writer(Interpreter):
    """Writes down the calls that another interpreter runs."""

    def __init__(self, run: Interpreter) -> None:
        self.graph = Graph()
        inputs: dict[Part, Any] = {leaf: self.graph.placeholder(str(leaf.name)) for leaf in run.leaves}
        super().__init__(run.numbers, run.small, inputs, run.coarsest and torch.float64)

    def program(self, part: Part) -> GraphModule:
        self.graph.output([self.run(part)])
        return GraphModule({}, self.graph)

    def called(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fake: Any) -> Any:
        return self.graph.call_function(target, tuple(args), dict(kwargs))
