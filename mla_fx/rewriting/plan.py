"""What a rule puts in the place of what it read: expressions over values of the graph, which hold no graph themselves.

The leaves are values that the graph has. A `Call` is an operator on expressions, numbers and sizes, which may be
symbols; the other expressions depend on more: on a type, on a trace, on the target. The engine drafts a plan, checks it
and asks the target, and only then adds its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from mla_fx.readings.axes import Index, composite
from mla_fx.readings.sizes import Size, product


class Expression:
    """A value that a plan computes, or takes from the graph."""

    @property
    def parts(self) -> Iterator[Any]:
        """What it is made of, among which are other expressions."""
        yield from ()


@dataclass(frozen=True, eq=False)
class Value(Expression):
    """A value of the graph, with the operation that it was read from, and the call by which the program reads it, if
    that does more than views and casts: what stands between these is known to the rule."""

    node: Node
    origin: Node
    read_by: Node | None = None


@dataclass(frozen=True, eq=False, init=False)
class Call(Expression):
    """An operator on expressions, sizes and numbers, or lists of them."""

    target: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __init__(self, target: Any, *args: Any, **options: Any) -> None:
        for name, value in (("target", target), ("args", args), ("options", options)):
            object.__setattr__(self, name, value)

    @property
    def parts(self) -> Iterator[Any]:
        yield from self.args
        yield from self.options.values()


@dataclass(frozen=True, eq=False)
class Cast(Expression):
    """A value in a type, which it may have already."""

    value: Expression
    dtype: torch.dtype

    @property
    def parts(self) -> Iterator[Any]:
        yield self.value


@dataclass(frozen=True, eq=False)
class Inlined(Expression):
    """The calls that a function of tensors makes."""

    function: Callable[..., Any]
    args: tuple[Expression, ...]

    @property
    def parts(self) -> Iterator[Any]:
        yield from self.args


@dataclass(frozen=True, eq=False)
class ByTarget(Expression):
    """A value for targets that refuse positions which a program refuses, and another for those that skip them."""

    refusing: Expression
    skipping: Expression

    @property
    def parts(self) -> Iterator[Any]:
        yield self.refusing
        yield self.skipping


@dataclass(frozen=True, eq=False)
class ViewOf(Expression):
    """A value that has to be a view of another, or else is refused for a reason."""

    value: Expression
    base: Node
    because: str

    @property
    def parts(self) -> Iterator[Any]:
        yield self.value


@dataclass(frozen=True, eq=False)
class Stands(Expression):
    """A value that stands for others, which are proved to be equal to it."""

    value: Expression
    alike: tuple[Node, ...]

    @property
    def parts(self) -> Iterator[Any]:
        yield self.value
        yield from self.alike


@dataclass(frozen=True)
class Part:
    """An element of a value that a plan computes, of `sizes`: what an `Element` is of one that the graph has."""

    value: Expression
    sizes: tuple[Size, ...]
    index: tuple[Index, ...]


def times(value: Expression, factor: float) -> Expression:
    return value if factor == 1.0 else Call(torch.ops.aten.mul.Tensor, value, factor)


def result(value: Expression, roles: Sequence[Sequence[Any]]) -> Part:
    """A computed value whose dimensions run over axes, as an element of these."""
    sizes = tuple(product(axis.size for axis in role) for role in roles)
    return Part(value, sizes, tuple(map(composite, roles)))


@dataclass(frozen=True)
class Replaced:
    """`new` is used wherever `old` was: the same values, in whatever layout. What reads the old one decides about that
    where it is applied, place by place, so that no rule has to look at readers."""

    old: Node
    new: Expression


@dataclass(frozen=True)
class Plan:
    """What replaces which values of the graph: all of it, or nothing."""

    replaced: tuple[Replaced, ...]
    sources: frozenset[Node] = field(init=False)
    """The operations from which its operands are read."""

    def __init__(self, *replaced: Replaced) -> None:
        object.__setattr__(self, "replaced", replaced)
        object.__setattr__(self, "sources", frozenset(_sources([one.new for one in replaced])))


def _sources(pending: list[Any]) -> Iterator[Node]:
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        if isinstance(part, Value):
            yield part.origin
            if part.read_by is not None:
                yield part.read_by
        elif isinstance(part, Node):
            yield part
        elif isinstance(part, Expression):
            seen.add(id(part))
            pending += part.parts
        elif isinstance(part, (list, tuple)):
            pending += part


def first_node(value: Any) -> Node:
    """The first value of the graph that an expression reads."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Value):
        return value.node
    parts = value.parts if isinstance(value, Expression) else value
    readers = (part for part in parts if isinstance(part, (Expression, Node, list, tuple)))
    return first_node(next(readers))
