"""Plans: the expressions that a rule puts in place of the values it read. A plan does not change the graph.

The leaves are values of the graph. A `Call` is an operator on expressions, numbers and sizes, which may be symbols. The
other expressions depend on more: on a dtype, on a trace, on the target. The engine drafts a plan, checks it and asks
the target, and only then adds its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.fx import Node

from mla_fx.readings.axes import Index, composite
from mla_fx.readings.sizes import Size, product


@dataclass(frozen=True, eq=False)
class Expression:
    """A value that a plan computes or reads from the graph."""

    @property
    def parts(self) -> Iterator[Any]:
        """What the expression is made of, among it other expressions."""
        return (getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, eq=False)
class Value(Expression):
    """A value of the graph.

    `origin` is the operation that it is read from. `read_by` is the call by which the program reads it, if that does
    more than views and casts. The rule accounts for everything between the two."""

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
    """A value converted to a dtype. This adds no call if it has that dtype already."""

    value: Expression
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Inlined(Expression):
    """The calls that a function of tensors makes."""

    function: Callable[..., Any]
    args: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class ByTarget(Expression):
    """Two alternatives: one for targets that refuse the positions a program refuses, one for targets that skip them."""

    refusing: Expression
    skipping: Expression


@dataclass(frozen=True, eq=False)
class ByHoisting(Expression):
    """Two alternatives: one for targets that compute once what depends on parameters alone, one for all others."""

    once: Expression
    each_step: Expression


@dataclass(frozen=True, eq=False)
class ViewOf(Expression):
    """A value that must be a view of `base`; otherwise the plan is refused for the given reason."""

    value: Expression
    base: Node
    because: str

    @property
    def parts(self) -> Iterator[Any]:
        yield self.value


@dataclass(frozen=True, eq=False)
class Representative(Expression):
    """A value that also replaces others, which are proved equal to it."""

    value: Expression
    alike: tuple[Node, ...]


@dataclass(frozen=True)
class Computed:
    """An element of a value of shape `sizes` that a plan computes; the counterpart of `Element` for graph values."""

    value: Expression
    sizes: tuple[Size, ...]
    index: tuple[Index, ...]


def times(value: Expression, factor: float) -> Expression:
    return value if factor == 1.0 else Call(torch.ops.aten.mul.Tensor, value, factor)


def result(value: Expression, roles: Sequence[Sequence[Any]]) -> Computed:
    """A computed value whose dimensions run over the axes in `roles`, as an element at these axes."""
    sizes = tuple(product(axis.size for axis in role) for role in roles)
    return Computed(value, sizes, tuple(map(composite, roles)))


@dataclass(frozen=True)
class Replacement:
    """`new` is used wherever `old` was. It has the same values, in any layout.

    Applying the plan decides about the layout from the readers of each old value, so no rule has to look at readers."""

    old: Node
    new: Expression


@dataclass(frozen=True)
class Plan:
    """The values of the graph to replace, and their replacements. A plan is applied as a whole or not at all.

    `differences` are sentences that say where an operator quantises differently from the program. Such a plan is
    applied only if the user takes the vendor's quantisation. `instead` is tried where the target refuses this plan,
    because its kernel lacks an option of the operator. The old values are computed from those in `without`, and do not
    depend on them."""

    replacements: tuple[Replacement, ...]
    differences: tuple[str, ...]
    exact: frozenset[Node]
    """Calls of the program that round nothing, because they get whole numbers."""
    instead: Plan | None
    sources: frozenset[Node] = field(init=False)
    """The operations from which the plan's operands are read, and those in `without`."""

    def __init__(
        self,
        *replacements: Replacement,
        differences: Sequence[str] = (),
        exact: Iterable[Node] = (),
        instead: Plan | None = None,
        without: Iterable[Node] = (),
    ) -> None:
        object.__setattr__(self, "replacements", replacements)
        object.__setattr__(self, "differences", tuple(differences))
        object.__setattr__(self, "exact", frozenset(exact))
        object.__setattr__(self, "instead", instead)
        object.__setattr__(self, "sources", frozenset((*_sources([one.new for one in replacements]), *without)))


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
    """The first graph node that an expression reads."""
    if isinstance(value, Node):
        return value
    if isinstance(value, Value):
        return value.node
    parts = value.parts if isinstance(value, Expression) else value
    readers = (part for part in parts if isinstance(part, (Expression, Node, list, tuple)))
    return first_node(next(readers))
