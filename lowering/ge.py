"""GE: fused operators become Ascend's own, and torchair converts the graph for CANN's graph engine (max-autotune).

A dump shows the GE graph (protobuf GraphDef, as torchair loads it) as text: one line for each operator.

    model.norm.weight: bfloat16[1024]
    RmsNorm_4 = RmsNorm(x=Add_9, gamma=model.norm.weight) epsilon=1e-06  # bfloat16[1, 1, 1024], float32[1, 1, 1]

Inputs come first, with the user's names. An output other than the first has its number after a colon. Constants stand
where they are read: numbers and a few integers, of others the type alone. After the inputs come attributes that differ
from the default of the operator's definition, and then the types of the results as far as torchair knows them, and
operators that only have to run before. torchair's own dumps are of the graph before its passes, or have 100 lines for
an operator."""

import functools
import importlib
import inspect
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.fx import Graph

from mla_fx.graph.provenance import label_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.target import Compiled

from .ascend import converters, toolchain
from .ascend.target import AscendTarget

LONG = 8
"""Constants of more elements are described instead of written out."""
ND, FRACTAL_NZ = 2, 29
_DTYPES = {"FLOAT": "float32", "BF16": "bfloat16", "DOUBLE": "float64"}
_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q", "bool": "?", "float16": "e"}
_CODES |= {"float32": "f", "float64": "d"}
_NOTED = re.compile(r"Tensor\(dtype=torch\.(\w+), shape=torch\.Size\((\[.*?\])\)")


class Ge(AscendTarget):
    name = "ge"
    kind = "ge"
    modes = (toolchain.GE_MODE,)

    def takes(self, operator: OpOverload) -> bool:
        return hasattr(operator, "_ge_converter")  # set by torchair's registration

    def remarks(self, graph: Graph) -> Iterable[str]:
        return converters.copied_caches(graph)

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        return toolchain.is_on_npu(example_inputs)

    def shown(self, made: Compiled, graph: Graph) -> list[str] | None:
        """The GE graph that torchair made, after its own passes."""
        found = getattr(toolchain.runner(made), "graph", None)
        if found is None or not hasattr(found, "op"):
            return None  # torchair's options for debugging run the operator graph instead
        labels = {node.name: label_of(node) for node in graph.find_nodes(op="placeholder")}
        return ge_text(found, labels)


def ge_text(graph: Any, labels: Mapping[str, str]) -> list[str]:
    """`labels` are the user's names of the graph's inputs."""
    names = {op.name: _constant(op) if op.type == "Const" else labels.get(op.name, op.name) for op in graph.op}
    given = sorted((op for op in graph.op if op.type in ("Data", "RefData")), key=lambda op: op.attr["index"].i)
    others = [op for op in graph.op if op.type not in ("Data", "RefData", "Const")]
    return [*(_data(op, names) for op in given), *(_operator(op, names) for op in others)]


# --- reading ---------------------------------------------------------------------------------------------------------


def inputs(op: Any) -> Iterator[tuple[str, str]]:
    """The names of an operator's inputs, and what feeds each: "operator:output"; unfed optional ones are left out."""
    fed = [source for source in op.input if not source.endswith(":-1")]  # -1 only orders operators
    for description, source in zip(op.input_desc, fed, strict=True):
        if source:
            yield description.name, source


def attributes(op: Any) -> dict[str, Any]:
    """The attributes of its kind; names with an underscore are torchair's and the engine's own notes."""
    return {name: value(attribute) for name, attribute in op.attr.items() if not name.startswith("_")}


def value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    if kind == "list":
        return next((list(values) for field, values in attribute.list.ListFields() if field.name != "val_type"), [])
    return attribute.s.decode() if kind == "s" else getattr(attribute, kind)


def shape(description: Any) -> list[int]:
    """-1 where free. Beside a format that is not ND, newer CANN has the shape as an attribute."""
    moved = description.attr["origin_shape"].list.i if "origin_shape" in description.attr else description.shape.dim
    return list(moved)


def memory_format(data: Any) -> int:
    """The format of an input's memory, which torchair notes when it first sees the tensor."""
    attributes = data.output_desc[0].attr
    return attributes["format_for_int"].i if "format_for_int" in attributes else ND


def _dtype(description: Any) -> str:
    numbers = description.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number
    name: str = numbers[description.dtype].name.removeprefix("DT_")
    return _DTYPES.get(name, name.lower())


# --- lines -----------------------------------------------------------------------------------------------------------


def _data(op: Any, names: Mapping[str, str]) -> str:
    described = op.output_desc[0]
    layout = " NZ" if memory_format(op) == FRACTAL_NZ else ""
    return f"{names[op.name]}: {_dtype(described)}{shape(described)}{layout}"


def _operator(op: Any, names: Mapping[str, str]) -> str:
    given = ", ".join(f"{name}={_source(source, names)}" for name, source in inputs(op))
    defaults = _defaults(op.type)
    settings = ((name, _rounded(value)) for name, value in sorted(attributes(op).items()))
    unusual = [f"{name}={value!r}" for name, value in settings if value != defaults.get(name)]
    line = " ".join([f"{names[op.name]} = {op.type}({given})", *unusual])
    notes = ", ".join([*_results(op), *_after(op, names)])
    return f"{line}  # {notes}" if notes else line


def _source(source: str, names: Mapping[str, str]) -> str:
    name, _, output = source.rpartition(":")
    return names[name] if output == "0" else f"{names[name]}:{output}"


def _results(op: Any) -> list[str]:
    notes = (described.attr["_meta"].s.decode() for described in op.output_desc if "_meta" in described.attr)
    found = [_NOTED.match(note) for note in notes]
    return [f"{noted[1]}{noted[2]}" if noted else "-" for noted in found]


def _after(op: Any, names: Mapping[str, str]) -> list[str]:
    before = [names[source.rpartition(":")[0]] for source in op.input if source.endswith(":-1")]
    return [f"after {', '.join(before)}"] if before else []


def _constant(op: Any) -> str:
    tensor = op.attr["value"].t
    dtype, sizes = _dtype(tensor.desc), list(tensor.desc.shape.dim)
    code = _CODES.get(dtype)
    numbers = struct.unpack(f"<{len(tensor.data) // struct.calcsize(code)}{code}", tensor.data) if code else ()
    if not sizes and numbers:
        return str(_rounded(numbers[0]))
    is_short = code is not None and len(numbers) <= LONG and code not in "efd"
    return str([*numbers]) if is_short and len(sizes) < 2 else f"{dtype}{sizes}"


@functools.cache
def _defaults(kind: str) -> dict[str, Any]:
    """Return the defaults of the attributes, from torchair's function for the operator."""
    function = getattr(importlib.import_module("torchair._ge_concrete_graph.ge_apis"), kind, None)
    parameters = inspect.signature(function).parameters.values() if function is not None else ()
    return {parameter.name: parameter.default for parameter in parameters}


def _rounded(value: Any) -> Any:
    """Attributes are float32: 1e-5 comes back as 9.999999747378752e-06."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
