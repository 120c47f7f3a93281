"""A function's graph, spliced into another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from mla_fx.graph.aliasing import written
from mla_fx.graph.torch_private import make_fx, tree_flatten, tree_unflatten

from .emitter import Emitter
from .fake_values import hashable, signature, unshared


def inline(
    emit: Emitter, function: Callable[..., Any], *arguments: Any, decompositions: Any = None, **options: Any
) -> Any:
    """The functional graph of `function` on `arguments`, spliced in; traced once for equal shapes and options."""
    leaves, structure = tree_flatten((arguments, options))
    nodes = [leaf for leaf in leaves if isinstance(leaf, Node)]
    values = [node.meta["val"] for node in nodes]
    described = tuple(None if isinstance(leaf, Node) else hashable(leaf) for leaf in leaves)
    key = (function, tuple(map(signature, values)), described, structure)
    if key not in emit.traced:

        def positional(*given: Any) -> Any:
            rest = iter(given)
            filled = [next(rest) if isinstance(leaf, Node) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, structure)
            return function(*args, **kwargs)

        with emit.known.faking():
            emit.traced[key] = _trace(positional, values, decompositions)
    return _splice(emit, emit.traced[key], nodes)


def _trace(function: Callable[..., Any], values: list[Any], decompositions: Any) -> GraphModule:
    from torch.func import functionalize

    # new tensors: an argument given twice, or sharing what is known with another, would be traced as one
    given = [unshared(value) if isinstance(value, torch.Tensor) else value for value in values]
    with torch.no_grad():
        traced: GraphModule = make_fx(function, decompositions, tracing_mode="real")(*given)
        if any(map(written, traced.graph.nodes)):  # few do, and functionalizing traces branches three times over
            traced = make_fx(functionalize(function), decompositions, tracing_mode="real")(*given)
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
        if node.op == "get_attr":  # a branch of a conditional
            copies[node] = emit.module(getattr(traced, str(node.target)))
            continue
        assert node.op == "call_function", f"cannot splice a {node.op} node"
        copies[node] = emit.copy(node, copies)
    raise AssertionError("a traced graph ends with its output")
