"""A GE graph as deterministic text: one line per operator, with its inputs and attributes.

MlaPrologV3_0(token_x=Data_0, weight_dq=Data_1, ...) weight_quant_mode=1
NetOutput_0(input0=MlaPrologV3_0:4)

An operator is named by its type and a running number, Data by the index of the graph's input, and a constant by its
values. An output other than the first has its number after a colon. After the inputs come attributes that differ from
the default of the operator's definition.
"""

from __future__ import annotations

import collections
import functools
import inspect
from typing import Any

from torchair._ge_concrete_graph import ge_apis

from npu import ge_graph
from npu.formats import FRACTAL_NZ

LONG = 8
"""Constants of more elements are described instead of written out."""


def ge_text(graph: Any) -> str:
    names = _names(graph)
    data = sorted((op for op in graph.op if op.type == "Data"), key=lambda op: op.attr["index"].i)
    others = (op for op in graph.op if op.type not in ("Data", "Const"))
    return "\n".join([_data(op) for op in data] + [_operator(op, names) for op in others])


def _names(graph: Any) -> dict[str, str]:
    numbers: dict[str, Any] = collections.defaultdict(lambda: iter(range(len(graph.op))))
    return {op.name: _name(op, numbers) for op in graph.op}


def _name(op: Any, numbers: dict[str, Any]) -> str:
    if op.type == "Data":
        return f"Data_{op.attr['index'].i}"
    return _constant(op) if op.type == "Const" else f"{op.type}_{next(numbers[op.type])}"


def _data(op: Any) -> str:
    described = op.output_desc[0]
    shape = ge_graph.shape(described)
    layout = " NZ" if ge_graph.memory_format(op) == FRACTAL_NZ else ""
    return f"Data_{op.attr['index'].i}: {_type(ge_graph.dtype(described))}{shape}{layout}"


def _constant(op: Any) -> str:
    value = ge_graph.constant(op)
    if value.numel() == 1 and value.ndim == 0:
        return str(_rounded(value.item()))
    return str(value.tolist()) if value.numel() <= LONG else f"{_type(value.dtype)}{list(value.shape)}"


def _operator(op: Any, names: dict[str, str]) -> str:
    inputs = ", ".join(f"{name}={_source(source, names)}" for name, source in ge_graph.inputs(op))
    defaults = _defaults(op.type)
    settings = ((name, _rounded(value)) for name, value in sorted(ge_graph.attributes(op).items()))
    unusual = [f"{name}={value!r}" for name, value in settings if value != defaults.get(name)]
    return " ".join([f"{names[op.name]}({inputs})", *unusual])


def _source(source: str, names: dict[str, str]) -> str:
    name, _, output = source.rpartition(":")
    return names[name] if output == "0" else f"{names[name]}:{output}"


@functools.cache
def _defaults(kind: str) -> dict[str, Any]:
    """Of the attributes, from torchair's function for the operator."""
    parameters = inspect.signature(getattr(ge_apis, kind)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters}


def _rounded(value: Any) -> Any:
    """Attributes are float32: 1e-5 comes back as 9.999999747378752e-06."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _type(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
