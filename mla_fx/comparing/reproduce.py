"""What a reproducer runs: the unfused and the fused graph on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy, Tracer
from torch.fx.node import map_aggregate

from mla_fx.errors import VerificationError
from mla_fx.graph.torch_private import OpOverloadPacket, tree_leaves

from .closeness import SAME, distance, wide_dtype
from .exact import Wide
from .samples import Like

__all__ = ["Like", "difference", "drawn", "reproduce", "reproduce_compiled"]

AGREE = "With random inputs nothing differs; the difference needs numbers like those of the model."


def reproduce(
    unfused: Callable[..., Any], fused: Callable[..., Any], inputs: Mapping[str, Any], names: Sequence[str]
) -> int:
    """Run both, print what differs, and return the exit status: 1 if something does. `names` are those of the
    results."""
    values = drawn(inputs)
    errors = difference(traced(unfused, inputs), traced(fused, inputs), values)
    name = str(_dtype(values)).removeprefix("torch.")
    for what, error in zip(names, errors, strict=True):
        print(f"{what}: fused and unfused are {error:.3g} apart in {name}, relative to the largest element")
    limit = SAME[_dtype(values)]
    if all(error <= limit for error in errors):
        print(AGREE)
        return 0
    print(f"The limit is {limit:.3g}.")
    return 1


def reproduce_compiled(fused: Callable[..., Any], inputs: Mapping[str, Any], **options: Any) -> int:
    """Compile a fused graph, print how what was compiled differs, and return the exit status: 1 if it does."""
    gm = traced(fused, inputs)
    try:
        with torch.no_grad():
            torch.compile(gm, backend="mla", options={**options, "verify": "first"})(*_ordered(gm, drawn(inputs)))
    except VerificationError as error:
        print(error)
        return 1
    print(AGREE)
    return 0


def traced(function: Callable[[Mapping[str, Proxy]], Any], names: Iterable[str]) -> GraphModule:
    """The graph of a function of the inputs by their names; what it makes of none of them is a constant."""
    tracer = Tracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = nn.Module(), (graph := Graph()), {}
    result = function({name: Proxy(graph.placeholder(name), tracer) for name in names})
    graph.output(map_aggregate(result, lambda value: value.node if isinstance(value, Proxy) else value))
    for node in graph.nodes:
        if isinstance(node.target, OpOverloadPacket):
            node.target = node.target.default
    return GraphModule(tracer.root, graph)


def drawn(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs; the same numbers in each process."""
    generator = torch.Generator().manual_seed(0)
    return {name: value.draw(generator) if isinstance(value, Like) else value for name, value in inputs.items()}


def difference(unfused: GraphModule, fused: GraphModule, values: Mapping[str, Any]) -> list[float]:
    """The distance of each result of two graphs in a dtype that hardly rounds."""
    dtype, found = _dtype(values), []
    for gm in (unfused, fused):
        given = _ordered(gm, values)
        with torch.no_grad():
            _Typed(gm).run(*given)
        found.append(Wide(gm, dtype).results(given).outputs)
    mine, theirs = (tree_leaves(results) for results in reversed(found))
    return [distance(*pair) for pair in zip(mine, theirs, strict=True)]


class _Typed(Interpreter):
    """Notes each node's value in its own precision, as compilers note it."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta["val"] = value.to("meta") if isinstance(value, Tensor) else value
        return value


def _ordered(gm: GraphModule, values: Mapping[str, Any]) -> list[Any]:
    return [values[str(node.target)] for node in gm.graph.find_nodes(op="placeholder")]


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    return wide_dtype(values.values())
