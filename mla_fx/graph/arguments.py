"""The arguments of calls by the names in the operators' schemas."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Protocol

from .torch_private import OpOverload


class Call(Protocol):
    """A node, or a call that is not in a graph yet."""

    target: Any
    args: Any
    kwargs: Any


def named_arguments(call: Call) -> Iterator[tuple[str, Any]]:
    """The arguments that are given; those of a function without a schema have no names."""
    names = names_of(call.target) if isinstance(call.target, OpOverload) else ("",) * len(call.args)
    yield from zip(names, call.args, strict=False)
    yield from call.kwargs.items()


@functools.cache
def names_of(target: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in target._schema.arguments)
