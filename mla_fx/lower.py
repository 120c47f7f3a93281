"""Handing the fused operators of a graph to a target, each as the plain function that the target has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from .emitter import Emitter
from .inline import inline
from .readings.views import args_of
from .target import Compiled, Lowering
from .torch_private import OpOverload


def lower(graph: Graph, lowerings: Mapping[OpOverload, Lowering], decompositions: Any) -> dict[str, int]:
    """Puts plain functions in the place of calls. Returns why calls stay, where there is something to tell, and how
    many."""
    emit = Emitter(graph)
    stay: dict[str, int] = {}
    for operator, lowering in lowerings.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            options = {name: _known(value) for name, value in node.kwargs.items()}
            found = lowering(*map(_known, args_of(node)), **options)
            if isinstance(found, str):
                sentence = f"{operator._opname} stays a call: {found}"
                stay[sentence] = stay.get(sentence, 0) + 1
            elif found is not None:
                _replace(emit, node, found, decompositions)
    return stay


def _known(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, Node) else value


def _replace(emit: Emitter, node: Node, function: Compiled, decompositions: Any) -> None:
    with emit.at(node, "lower"):
        results = inline(emit, function, *args_of(node), decompositions=decompositions, **node.kwargs)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[args_of(user)[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
