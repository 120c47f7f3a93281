"""A call that may be added to a graph, with its fake value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from torch.fx import Node
from torch.fx.node import map_aggregate


class Draft:
    """A call on nodes, other drafts and constants. Drafts compare by identity."""

    __slots__ = ("args", "kwargs", "meta", "name", "operands", "target", "value")

    def __init__(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        value: Any,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.args, self.kwargs, self.value = target, args, kwargs, value
        self.name, self.meta = name, meta or {}
        leaves: list[Any] = []
        map_aggregate((args, kwargs), leaves.append)
        self.operands: list[Node | Draft] = [leaf for leaf in leaves if is_value(leaf)]


def is_value(part: Any) -> TypeGuard[Node | Draft]:
    return type(part) is Draft or type(part) is Node


def value_of(part: Node | Draft) -> Any:
    """The fake value of a node or draft."""
    return part.value if isinstance(part, Draft) else part.meta["val"]


def fake_of(value: Any) -> Any:
    """An argument with nodes and drafts replaced by their fake values."""
    if is_value(value):
        return value.value if isinstance(value, Draft) else value.meta.get("val")
    return [fake_of(item) for item in value] if isinstance(value, (list, tuple)) else value


def in_order(ends: Iterable[Node | Draft]) -> list[Draft]:
    """All drafts that the given values depend on, operands first."""
    ordered: dict[Draft, None] = {}

    def visit(part: Node | Draft) -> None:
        if isinstance(part, Draft) and part not in ordered:
            for operand in part.operands:
                visit(operand)
            ordered[part] = None

    for end in ends:
        visit(end)
    return list(ordered)
