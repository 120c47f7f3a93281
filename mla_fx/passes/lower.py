"""Handing the fused operators of a graph to a target, each as the plain function that the target has for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops import catalogue
from mla_fx.readings.calls import args_of
from mla_fx.rewriting.draft import fake_of
from mla_fx.rewriting.emitter import Emitter
from mla_fx.target import Compiled, Lowering


def lower(
    graph: Graph, lowerings: Mapping[OpOverload, Lowering], decompositions: Any, *, keeps_calls: bool
) -> Counter[str]:
    """Puts plain functions in the place of calls: the target's, or the operator's body if it has none and no call may
    stay. Returns notes for the report, each with its count: why calls were not lowered, and what plain operators
    became."""
    emit, notes = Emitter(graph), Counter[str]()
    own = {entry.overload: entry.decomposition for entry in catalogue().values()}
    bodies = {} if keeps_calls else own
    for operator, lowering in {**bodies, **lowerings}.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            function, refusal = _asked(node, lowering)
            if refusal is not None and operator in bodies:
                function, _ = _asked(node, bodies[operator])
            if refusal is not None and operator in own:
                outcome = "stays a call" if function is None else "becomes its body"
                notes[f"{operator._opname} {outcome}: {refusal.reason}"] += 1
            if function is None:
                continue
            if operator not in own:
                notes[f"{operator._opname} is computed as {function.__name__}"] += 1
            _replace(emit, node, function, decompositions)
    return notes


def _asked(node: Node, lowering: Lowering) -> tuple[Compiled | None, NoMatch | None]:
    try:
        return lowered(node, lowering), None
    except NoMatch as refusal:
        return None, refusal


def lowered(node: Node, lowering: Lowering) -> Compiled:
    """What a target makes of a call, given what is known of its arguments. Raises NoMatch if the call stays."""
    options = {name: fake_of(value) for name, value in node.kwargs.items()}
    return lowering(*map(fake_of, args_of(node)), **options)


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
