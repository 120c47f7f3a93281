"""What torchair makes of a test's functions: GE graphs, which run on the CPU.

Importing this replaces the graph engine by an interpreter of GE graphs. Everything that torchair does before it passes
its graph to the engine is real, and so is writing mutated inputs afterwards.
"""

from __future__ import annotations

import unittest.mock
from collections.abc import Sequence
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the operators that torchair converts
import torchair
from mla_fx.lowering.ascend.stub import environment
from torch import Tensor
from torchair._ge_concrete_graph import fx2ge_converter
from torchair.core import _backend

from npu import formats, products  # noqa: F401  `products` makes those of 16-bit matrices fast
from npu.ge_interpreter import Interpreter

graphs: list[Any] = []
"""The GE graphs (protobuf GraphDef) that were loaded since the test began, in order."""


def compiled(function: Any, *, dynamic: bool | None = False, **config: Any) -> Any:
    """`function` compiled by torchair alone."""
    return torch.compile(function, backend=torchair.get_npu_backend(**config), dynamic=dynamic)


def types(graph: Any) -> list[str]:
    """The types of a graph's operators in order, without inputs and constants."""
    return [op.type for op in graph.op if op.type not in ("Data", "Const")]


class Executor:
    """Replaces torchair's binding to the graph engine: keeps the loaded graph, and interprets it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def load(self, ge_graph: Any, options: Any = None) -> None:
        graph = ge_graph.model.graph[0]
        graphs.append(graph)
        self.interpreter = Interpreter(graph)

    def compile(self) -> None:
        pass

    def run(self, inputs: Sequence[Tensor], assigned: Sequence[Tensor | None] = (), stream: Any = None) -> list[Tensor]:
        """The outputs, each in the memory that was assigned to it, if any was: so are mutated inputs written."""
        outputs = self.interpreter.run(inputs)
        for index, memory in enumerate(assigned):
            if memory is not None:
                outputs[index] = memory.copy_(outputs[index])
        return outputs


def _read_formats(graph: Any, inputs: Sequence[Tensor]) -> None:
    """torchair's own, told that the inputs lie on an NPU: it asks nothing but NPU tensors for their format."""
    with unittest.mock.patch.object(torch.Tensor, "is_npu", True):
        _update_internal_format_from_inputs(graph, inputs)


_update_internal_format_from_inputs = fx2ge_converter._update_internal_format_from_inputs
fx2ge_converter._update_internal_format_from_inputs = _read_formats
environment.leave_out_engine()
_backend.TorchNpuGraph = Executor
formats.register()
torch.backends.cuda.enable_flash_sdp(False)  # PyTorch's flash attention for the CPU, which is on no NPU


def count(graph: Any, *names: str) -> list[int]:
    found = types(graph)
    return [found.count(name) for name in names]
