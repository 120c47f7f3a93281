"""The arguments of calls, for readings. Each call that is read is recorded, so that a replay can compare it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Node

from mla_fx.graph.schemas import names_of
from mla_fx.graph.torch_private import OpOverload

aten = torch.ops.aten
CASTS = frozenset(
    {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout}
)
MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIVIDES = frozenset({aten.div.Tensor, aten.div.Scalar})

_looked_at: ContextVar[set[Node] | None] = ContextVar("nodes whose arguments were asked for", default=None)


@contextlib.contextmanager
def noting() -> Iterator[set[Node]]:
    """Record every node whose arguments are read: all that readings know about how a value is computed."""
    noted: set[Node] = set()
    token = _looked_at.set(noted)
    try:
        yield noted
    finally:
        _looked_at.reset(token)


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a node; torch types them as anything that a graph may hold. Readings get arguments, operands and
    options only through this module."""
    noted = _looked_at.get()
    if noted is not None:
        noted.add(node)
    return node.args


def options_of(node: Node) -> Mapping[str, Any]:
    """The keyword arguments of a node."""
    args_of(node)
    return node.kwargs


def operands_of(node: Node) -> list[Node]:
    """The nodes among the arguments of a node."""
    args_of(node)
    return node.all_input_nodes


def argument(node: Node, position: int, name: str = "", default: Any = None) -> Any:
    """An argument by position or name; an operator's schema knows the name."""
    if len(args_of(node)) > position:
        return args_of(node)[position]
    if not name and isinstance(node.target, OpOverload):
        name = names_of(node.target)[position]
    return options_of(node).get(name, default)


def positional(call: Node) -> dict[str, Any]:
    """The arguments of an operator's call that may be given by position, by name. None are those left out."""
    assert isinstance(call.target, OpOverload), "the call of an operator"
    names = (argument.name for argument in call.target._schema.arguments if not argument.kwarg_only)
    return {name: named_argument(call, name) for name in names}


def keywords(call: Node) -> dict[str, Any]:
    """What is given to a call and cannot be given by position."""
    others = positional(call)
    return {name: value for name, value in options_of(call).items() if name not in others}


def named_argument(call: Node, name: str) -> Any:
    """An argument of an operator's call by its name in the schema, given by position or by name."""
    assert isinstance(call.target, OpOverload), "the call of an operator"
    names = names_of(call.target)
    return argument(call, names.index(name), name) if name in names else None
