"""What a reproducer runs: the unfused and the fused graph on random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import VerificationError
from mla_fx.graph.torch_private import tree_leaves

from .closeness import SAME, distance, wide_dtype
from .exact import Wide
from .samples import Like

__all__ = ["Like", "distances", "drawn", "reproduce", "reproduce_compiled"]

Function = Callable[[Mapping[str, Any]], Any]
AGREE = "With random inputs nothing differs; the difference needs numbers like those of the model."


def reproduce(unfused: Function, fused: Function, inputs: Mapping[str, Any], names: Sequence[str]) -> int:
    """Run both, print what differs, and return the exit status: 1 if something does. `names` are those of the
    results."""
    values = drawn(inputs)
    errors = distances(unfused, fused, values)
    name = str(_dtype(values)).removeprefix("torch.")
    for what, error in zip(names, errors, strict=True):
        print(f"{what}: fused and unfused are {error:.3g} apart in {name}, relative to the largest element")
    limit = SAME[_dtype(values)]
    if all(error <= limit for error in errors):
        print(AGREE)
        return 0
    print(f"The limit is {limit:.3g}.")
    return 1


def reproduce_compiled(fused: Function, inputs: Mapping[str, Any], **options: Any) -> int:
    """Compile a fused graph, print how what was compiled differs, and return the exit status: 1 if it does."""
    try:
        with torch.no_grad():
            torch.compile(fused, backend="mla", options={**options, "verify": "first"})(drawn(inputs))
    except VerificationError as error:
        print(error)
        return 1
    print(AGREE)
    return 0


def drawn(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs; the same numbers in each process."""
    generator = torch.Generator().manual_seed(0)
    return {name: value.draw(generator) if isinstance(value, Like) else value for name, value in inputs.items()}


def distances(unfused: Function, fused: Function, values: Mapping[str, Any]) -> list[float]:
    """The distance of each result of two functions in a dtype that hardly rounds."""
    graphs, dtype = (traced(function, values) for function in (unfused, fused)), _dtype(values)
    found = (Wide(gm, dtype).results([*values.values()]).outputs for gm in graphs)
    return [distance(mine, theirs) for theirs, mine in zip(*map(tree_leaves, found), strict=True)]


def traced(function: Function, values: Mapping[str, Any]) -> GraphModule:
    """The graph of a function, with what compilers note of each value."""

    def named(*given: Any) -> Any:
        inputs = dict(zip(values, given, strict=True))
        if not isinstance(function, GraphModule):
            return function(inputs)
        return function(*(inputs[str(node.target)] for node in function.graph.find_nodes(op="placeholder")))

    with torch.no_grad():
        return make_fx(named)(*values.values())


def _dtype(values: Mapping[str, Any]) -> torch.dtype:
    return wide_dtype(values.values())
