"""Calls that may be added to a graph, with their fake values, and plans of such calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.fx import Node
from torch.fx.node import map_aggregate

from mla_fx.graph.provenance import fused_name


class Draft:
    """A call on nodes, other drafts and constants. Drafts compare by identity. If it `is_input`, its result becomes a
    graph input, which is computed before the graph runs; a view of an input takes the place of that input."""

    __slots__ = ("args", "is_input", "kwargs", "meta", "name", "operands", "target", "value")

    def __init__(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        value: Any,
        name: str | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        is_input: bool = False,
    ) -> None:
        self.target, self.args, self.kwargs, self.value = target, args, kwargs, value
        self.name, self.meta, self.is_input = name, dict(meta or {}), is_input
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


@dataclass(frozen=True)
class Change:
    """A plan whose calls are all drafted, operands first, but not yet in the graph. If it `differs`, it rounds some
    codes otherwise. If copies are `dropped`, the first replaced value is that of a call, which then writes itself."""

    replacements: tuple[tuple[Node, Draft | Node], ...]
    sources: Set[Node]
    calls: tuple[Draft, ...]
    exact: Set[Node] = frozenset()
    differs: bool = False
    dropped: tuple[Node, ...] = ()
    readers: Set[Node] | None = None
    """Those that read the new values. None are all."""

    @classmethod
    def of(
        cls,
        replacements: Iterable[tuple[Node, Draft | Node]],
        sources: Set[Node],
        exact: Set[Node] = frozenset(),
        *,
        differs: bool = False,
        dropped: Iterable[Node] = (),
        readers: Iterable[Node] | None = None,
    ) -> Change:
        news, only = tuple(replacements), None if readers is None else {*readers}
        return cls(news, sources, tuple(in_order(new for _, new in news)), exact, differs, tuple(dropped), only)

    @property
    def olds(self) -> list[Node]:
        return [old for old, _ in self.replacements]

    @property
    def fused(self) -> list[Draft]:
        """The calls of this project's operators."""
        return [call for call in self.calls if fused_name(call) is not None]
