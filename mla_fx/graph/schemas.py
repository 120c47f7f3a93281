"""What the operators' schemas say of calls: the names of arguments, which values share memory as views do, and what
reads or writes through them."""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from .torch_private import OpOverload

aten = torch.ops.aten

Argument = tuple[int, str]  # positional and keyword arguments of an operator

# Views whose schema does not say so.
UNDECLARED = frozenset({aten._unsafe_view.default, aten.broadcast_tensors.default, aten.meshgrid.default})
# Operators whose arguments say where in an operand's memory an element is.
BY_STRIDES = frozenset(
    {
        aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
        aten._reshape_alias.default, aten.sym_stride.int, aten.sym_storage_offset.default,
    }
)  # fmt: skip
# Operators that copy: the result has the values of the second operand and the shape of the first.
COPIES = frozenset({aten.copy_.default, aten.copy.default})
# Views by their schema that copy if the strides of the source do not allow a view.
MAY_COPY = frozenset({"reshape", "reshape_as", "contiguous", "flatten", "ravel", "to", "type_as"})


class CallLike(Protocol):
    """A node, or a call that is not in a graph yet."""

    target: Any
    args: Any
    kwargs: Any


def named_arguments(call: CallLike) -> Iterator[tuple[str, Any]]:
    """The arguments that are given; those of a function without a schema have no names."""
    names = names_of(call.target) if isinstance(call.target, OpOverload) else ("",) * len(call.args)
    yield from zip(names, call.args, strict=False)
    yield from call.kwargs.items()


@functools.cache
def names_of(target: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in target._schema.arguments)


@functools.cache
def updated_arguments(target: OpOverload) -> dict[int, str]:
    """The results that are updated arguments: position of the result -> name of the argument."""
    arguments, results = names_of(target), [result.name.removesuffix("_out") for result in target._schema.returns]
    return {place: name for place, name in enumerate(results) if name in arguments}


def may_share(node: Node) -> list[Node]:
    """The operands whose memory a node's result may alias, or contain as one of several results."""
    if node.op == "call_function" and node.target is operator.getitem:
        return node.all_input_nodes[:1]
    if not isinstance(node.target, OpOverload):
        return []
    shared = _shared(node.target)
    if shared is None:
        return node.all_input_nodes
    return [operand for argument in shared for operand in _operands(node, argument)]


def surely_shares(node: Node) -> Node | None:
    """The operand that a node is a view of in any layout, or None."""
    target = node.target
    if not isinstance(target, OpOverload) or not target.is_view:
        return None
    source = next(iter(may_share(node)), None)
    if source is None or target._opname not in MAY_COPY:
        return source
    is_dense = bool(target is aten.reshape.default and source.meta["val"].is_contiguous())
    return source if is_dense else None


def written(node: Node) -> list[Node]:
    """The operands that a node writes in place."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return []
    return [operand for argument in _overwritten(node.target) for operand in _operands(node, argument)]


def owner(node: Node) -> Node:
    """The value at the end of a chain of views."""
    while node.op == "call_function" and (shared := may_share(node)):
        node = shared[0]
    return node


def owners_in(graph: Graph) -> dict[Node, Node]:
    """The owner of each value, in one walk."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        shared = may_share(node) if node.op == "call_function" else []
        found[node] = found[shared[0]] if shared else node
    return found


def readers(value: Node) -> Iterator[Node]:
    """The nodes that read a value, directly or through views. A view itself does not read it, nor does a node that only
    overwrites it."""
    for user in value.users:
        if user.target in COPIES and user.args[0] is value and user.args[1] is not value:
            continue
        if value in may_share(user) and value not in written(user):
            yield from readers(user)
        else:
            yield user


def stride_readers(value: Node) -> Iterator[Node]:
    """The nodes that read the memory of a value by strides of their own, directly or through views."""
    for user in value.users:
        if user.target in BY_STRIDES:
            yield user
        elif value in may_share(user):
            yield from stride_readers(user)


def writers(value: Node) -> Iterator[Node]:
    """The nodes that write a value in place, directly or through views."""
    for user in value.users:
        if value in written(user):
            yield user
        elif value in may_share(user):
            yield from writers(user)


@functools.cache
def _shared(target: OpOverload) -> tuple[Argument, ...] | None:
    """Return the arguments that a result may share memory with; None if the operator does not declare them."""
    if target in UNDECLARED:
        return None
    if not any(result.alias_info for result in target._schema.returns):
        return ()
    return _arguments(target, lambda info: True)


@functools.cache
def _overwritten(target: OpOverload) -> tuple[Argument, ...]:
    return _arguments(target, lambda info: bool(info.is_write))


def _arguments(target: OpOverload, wanted: Callable[[Any], bool]) -> tuple[Argument, ...]:
    given = enumerate(target._schema.arguments)
    return tuple((position, one.name) for position, one in given if one.alias_info and wanted(one.alias_info))


def _operands(node: Node, argument: Argument) -> list[Node]:
    position, name = argument
    value: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [item for item in values if isinstance(item, Node)]
