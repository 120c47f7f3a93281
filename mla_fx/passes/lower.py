"""Handing the fused operators of a graph to a target, each as the plain function that the target has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops import catalogue
from mla_fx.readings.calls import args_of
from mla_fx.rewriting.emitter import Emitter
from mla_fx.target import Compiled, Lowering


def lower(
    graph: Graph, lowerings: Mapping[OpOverload, Lowering], decompositions: Any, *, keeps_calls: bool
) -> dict[str, int]:
    """Puts plain functions in the place of calls: the target's, or the operator's body if it has none and no call may
    stay. Returns what is to be told, and how often: why calls were not lowered, and what became of plain operators."""
    emit = Emitter(graph)
    known = {entry.overload: entry.decomposition for entry in catalogue().values()}
    bodies = {} if keeps_calls else known
    told: dict[str, int] = {}
    for operator, lowering in {**bodies, **lowerings}.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            found = lowered(node, lowering)
            if isinstance(found, str):
                body = lowered(node, bodies[operator]) if operator in bodies else None
                kept = "stays a call" if body is None or isinstance(body, str) else "becomes its body"
                _tell(told, f"{operator._opname} {kept}: {found}")
                found = body
            if found is not None and not isinstance(found, str):
                if operator not in known:
                    _tell(told, f"{operator._opname} is computed as {found.__name__}")
                _replace(emit, node, found, decompositions)
    return told


def _tell(told: dict[str, int], sentence: str) -> None:
    told[sentence] = told.get(sentence, 0) + 1


def lowered(node: Node, lowering: Lowering) -> Compiled | str | None:
    """What a target makes of a call, of whose arguments it is told what is known."""
    options = {name: _known(value) for name, value in node.kwargs.items()}
    return lowering(*map(_known, args_of(node)), **options)


def _known(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_known(item) for item in value]
    return value.meta.get("val") if isinstance(value, Node) else value


def _replace(emit: Emitter, node: Node, function: Compiled, decompositions: Any) -> None:
    with emit.at(node, "lower"):
        results = emit.inline(function, *args_of(node), decompositions=decompositions, **node.kwargs)
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[args_of(user)[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
