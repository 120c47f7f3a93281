"""Reading a GE graph (protobuf GraphDef, as torchair loads it): inputs, attributes, constants and formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torchair.ge._ge_graph import _ge_proto_dtype_to_ge_dtype, ge_type_to_torch_type

from npu.formats import ND


def inputs(op: Any) -> Iterator[tuple[str, str]]:
    """The names of an operator's inputs, and what feeds each: "operator:output"; unfed optional ones are left out."""
    fed = [source for source in op.input if not source.endswith(":-1")]  # -1 only orders operators
    for description, source in zip(op.input_desc, fed, strict=True):
        if source:
            yield description.name, source


def predecessors(op: Any) -> list[str]:
    """The operators that come before, because of their results or by order alone."""
    return [source.rpartition(":")[0] for source in op.input if source]


def attributes(op: Any) -> dict[str, Any]:
    """The attributes of its kind; names with an underscore are torchair's and the engine's own notes."""
    return {name: value(attribute) for name, attribute in op.attr.items() if not name.startswith("_")}


def value(attribute: Any) -> Any:
    kind = attribute.WhichOneof("value")
    if kind == "list":
        return next((list(values) for field, values in attribute.list.ListFields() if field.name != "val_type"), [])
    return attribute.s.decode() if kind == "s" else getattr(attribute, kind)


def constant(op: Any) -> Tensor:
    tensor = op.attr["value"].t
    flat = torch.frombuffer(bytearray(tensor.data), dtype=dtype(tensor.desc)) if tensor.data else None
    shape = list(tensor.desc.shape.dim)
    return torch.empty(shape, dtype=dtype(tensor.desc)) if flat is None else flat.reshape(shape)


def dtype(description: Any) -> torch.dtype:
    return ge_type_to_torch_type(_ge_proto_dtype_to_ge_dtype(description.dtype))


def shape(description: Any) -> list[int]:
    """-1 where free. Beside a format that is not ND, newer CANN has the shape as an attribute."""
    moved = description.attr["origin_shape"].list.i if "origin_shape" in description.attr else description.shape.dim
    return list(moved)


def memory_format(data: Any) -> int:
    """The format of an input's memory, which torchair notes when it first sees the tensor."""
    attributes = data.output_desc[0].attr
    return attributes["format_for_int"].i if "format_for_int" in attributes else ND


def promised(description: Any) -> torch.dtype | None:
    """The dtype of a traced result; None for what a converter has between its operators. The shape that torchair notes
    there is no promise: where views follow it is theirs."""
    return dtype(description) if description.attr["_meta"].s.startswith(b"Tensor(") else None
