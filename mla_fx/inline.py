"""A function's graph, spliced into another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .emitter import Emitter, hashable
from .known import signature, unshared
from .torch_private import make_fx


def inline(
    emit: Emitter, function: Callable[..., Any], *arguments: Node | None, decompositions: Any = None, **options: Any
) -> Any:
    """The functional graph of `function` on `arguments`, spliced in; traced once for equal shapes and options."""
    values = [None if argument is None else argument.meta["val"] for argument in arguments]
    key = (function, tuple(None if value is None else signature(value) for value in values), hashable(options))
    if key not in emit.traced:
        with emit.known.faking():
            emit.traced[key] = _trace(functools.partial(function, **options), values, decompositions)
    return _splice(emit, emit.traced[key], [argument for argument in arguments if argument is not None])


def _trace(function: Callable[..., Any], values: list[Any], decompositions: Any) -> GraphModule:
    from torch.func import functionalize

    # new tensors: an argument given twice, or sharing what is known with another, would be traced as one
    given = [unshared(value) for value in values if value is not None]

    def positional(*tensors: Any) -> Any:
        rest = iter(tensors)
        return function(*[None if value is None else next(rest) for value in values])

    with torch.no_grad():
        traced: GraphModule = make_fx(functionalize(positional), decompositions, tracing_mode="real")(*given)
    traced.graph.eliminate_dead_code()
    return traced


def _splice(emit: Emitter, traced: GraphModule, arguments: list[Node]) -> Any:
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    copies: dict[Node, Node] = dict(zip(placeholders, arguments, strict=True))
    for node in traced.graph.nodes:
        if node.op == "output":
            return torch.fx.map_arg(node.args[0], copies.__getitem__)
        if node.op == "placeholder":
            continue
        assert node.op == "call_function", f"cannot splice a {node.op} node"
        copies[node] = emit.graph.node_copy(node, copies.__getitem__)
        emit.added.append(copies[node])
    raise AssertionError("a traced graph ends with its output")
