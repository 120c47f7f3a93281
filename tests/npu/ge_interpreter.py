"""Runs a GE graph on CPU tensors, operator by operator, from nothing but the graph.

Each operator type is a function of that name in a file of `ge_ops/`; its parameters are the inputs and attributes of
the
operator's definition.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from npu import formats, ge_graph, ge_ops, ge_releases
from npu.ge_writes import check_writes

# What the kernels read in FRACTAL_NZ alone.
NEEDS_NZ = dict.fromkeys(("MlaProlog", "MlaPrologV2", "MlaPrologV3"), ("weight_dq", "weight_uq_qr", "weight_dkv_kr"))

HELD_BY_THE_GRAPH = ("Data", "Const", "NetOutput")
FILES = [importlib.import_module(f"npu.ge_ops.{file.name}") for file in pkgutil.iter_modules(ge_ops.__path__)]


class Interpreter:
    """A loaded graph. Raises NotImplementedError for an operator type that no file in `ge_ops/` has."""

    def __init__(self, graph: Any) -> None:
        self.operators = _ordered(graph)
        check_writes(self.operators)
        self.functions = {op.type: _function(op.type) for op in self.operators if op.type not in HELD_BY_THE_GRAPH}

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs for these inputs, in memory of their own. Operators that write in place write the inputs."""
        values: dict[str, Tensor] = {}
        nz: set[str] = set()
        for op in self.operators:
            if op.type == "Const":
                values[f"{op.name}:0"] = ge_graph.constant(op)
            elif op.type == "Data":
                values[f"{op.name}:0"] = _input(op, inputs, nz)
            elif op.type == "NetOutput":
                return [values[source].clone() for _, source in ge_graph.inputs(op)]
            else:
                _check_formats(op, nz)
                for index, result in enumerate(self._run(op, values)):
                    _check_result(op, index, result)
                    values[f"{op.name}:{index}"] = result
        return []

    def _run(self, op: Any, values: dict[str, Tensor]) -> Sequence[Tensor]:
        function = self.functions[op.type]
        arguments = _arguments(op, function, values) | ge_graph.attributes(op)
        if op.type in ge_releases.RULES:
            ge_releases.check(op.type, arguments)
        results = function(**arguments)
        return [results] if isinstance(results, Tensor) else results


def _ordered(graph: Any) -> list[Any]:
    """The operators, each after those it needs, else in the order of the graph; NetOutput last."""
    by_name = {op.name: op for op in graph.op}
    ordered: dict[str, Any] = {}

    def append(op: Any) -> None:
        for name in ge_graph.predecessors(op):
            if name not in ordered:
                append(by_name[name])
        ordered[op.name] = op

    for op in sorted(graph.op, key=lambda op: op.type == "NetOutput"):
        if op.name not in ordered:
            append(op)
    return list(ordered.values())


def _function(kind: str) -> Callable[..., Any]:
    for file in FILES:
        if hasattr(file, kind):
            return getattr(file, kind)
    raise NotImplementedError(f"no file in tests/npu/ge_ops has the GE operator {kind}")


def _arguments(op: Any, function: Callable[..., Any], values: dict[str, Tensor]) -> dict[str, Any]:
    """Names arguments; numbered inputs (x0, x1, ...) of a parameter x come as a list."""
    parameters = inspect.signature(function).parameters
    arguments: dict[str, Any] = {}
    for name, source in ge_graph.inputs(op):
        group = name.rstrip("0123456789")
        if name in parameters or group not in parameters:
            arguments[name] = values[source]
        else:
            arguments.setdefault(group, []).append(values[source])
    return arguments


def _input(data: Any, inputs: Sequence[Tensor], nz: set[str]) -> Tensor:
    tensor = inputs[data.attr["index"].i]
    if ge_graph.memory_format(data) != formats.FRACTAL_NZ:
        is_scalar = not data.output_desc[0].shape.dim  # torchair hands sizes over as tensors of one element
        return tensor.reshape(()) if is_scalar else tensor
    nz.add(f"{data.name}:0")
    return formats.from_nz(tensor)


def _check_formats(op: Any, nz: set[str]) -> None:
    for name, source in ge_graph.inputs(op):
        if name in NEEDS_NZ.get(op.type, ()) and source not in nz:
            raise ValueError(f"{op.type} reads {name} in FRACTAL_NZ (format 29), but {source} is ND (format 2)")


def _check_result(op: Any, index: int, result: Tensor) -> None:
    promised = ge_graph.promised(op.output_desc[index])
    if promised not in (None, result.dtype):
        raise ValueError(f"output {index} of {op.type} {op.name} is {result.dtype}, torchair promised {promised}")
