"""Checks that in-place writes are defined on a device, where only results and control edges give an order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu import ge_graph


def check_writes(operators: Sequence[Any]) -> None:
    """Raises ValueError for a write into memory that may be anyone's, and for a read beside a write."""
    by_name = {op.name: op for op in operators}
    before = _before(operators)
    for op in (op for op in operators if op.type != "Data"):
        for name, source in _written(op):
            owner = by_name[source.rpartition(":")[0]]
            if owner.type not in ("Data", "TensorMove") and not list(_written(owner)):
                raise ValueError(f"{op.type} writes {name} in place, which is the result of {owner.type} {owner.name}")
            for reader in _readers(operators, source):
                if reader.name not in before[op.name] and op.name not in before[reader.name] and reader is not op:
                    raise ValueError(f"{reader.type} {reader.name} reads {source}, which {op.type} writes, in no order")


def _written(op: Any) -> list[tuple[str, str]]:
    """The inputs that an operator writes: those whose name one of its outputs has."""
    outputs = {description.name for description in op.output_desc}
    return [(name, source) for name, source in ge_graph.inputs(op) if name in outputs]


def _readers(operators: Sequence[Any], source: str) -> list[Any]:
    """The operators that read a value, but for the graph's own output, which comes last."""
    return [op for op in operators if op.type != "NetOutput" and source in op.input]


def _before(operators: Sequence[Any]) -> dict[str, set[str]]:
    """The names of all operators that an operator comes after."""
    before: dict[str, set[str]] = {}
    for op in operators:
        direct = set(ge_graph.predecessors(op))
        before[op.name] = direct.union(*(before[name] for name in direct))
    return before
