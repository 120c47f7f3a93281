"""Replaces the fused operators of a graph by the plain functions that a target has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload, tree_leaves
from mla_fx.ops import catalogue
from mla_fx.proving.interpreter import may_run
from mla_fx.readings.calls import CASTS, args_of
from mla_fx.readings.views import RESHAPES
from mla_fx.rewriting.cleanup import drop_turns
from mla_fx.rewriting.draft import fake_of
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.replacement import Drafted, Prove
from mla_fx.target import Compiled, Lowering

aten = torch.ops.aten
CODES = (torch.int8, torch.uint8)
VIEWS = RESHAPES | {aten.permute.default, aten.slice.Tensor, aten.select.int}


def lower(
    graph: Graph,
    lowerings: Mapping[OpOverload, Lowering],
    decompositions: Any,
    prove: Prove,
    bodies: Mapping[OpOverload, Lowering],
) -> Counter[str]:
    """Replace calls by plain functions: those of `lowerings`, or of `bodies` where these refuse. `prove` may refuse
    with NoMatch; the call then stays.

    Returns notes for the report with their counts: why calls were not lowered, and how plain operators are computed."""
    emit, notes = Emitter(graph), Counter[str]()
    own = {form for entry in catalogue().values() for form in (entry.overload, entry.host)}
    for operator, lowering in {**bodies, **lowerings}.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            operands = args_of(node) if operator in own else [_stored(emit, operand) for operand in args_of(node)]
            function, refusal = _asked(node, lowering, operands)
            if refusal is not None and operator in bodies:
                function, _ = _asked(node, bodies[operator], operands)
            if refusal is not None and operator in own:
                outcome = "stays a call" if function is None else "becomes its body"
                notes[f"{operator._opname} {outcome}: {refusal.reason}"] += 1
            if function is None:
                continue
            with emit.at(node, "lower"):
                results = emit.inline(function, *operands, decompositions=decompositions, **node.kwargs)
                drop_turns(emit.added)
            pairs = _pairs(node, results)
            read = {operand for operand in tree_leaves(operands) if isinstance(operand, Node)}
            try:
                if all(map(may_run, (node, *emit.added))):  # vendors' operators do not run here
                    prove(f"the lowering of {operator._opname}", Drafted.of(pairs, read))
            except NoMatch as refuted:
                notes[f"{operator._opname} stays a call: {refuted.reason}"] += 1
                continue
            if operator not in own:
                notes[f"{operator._opname} is computed as {function.__name__}"] += 1
            _replace(node, pairs)
    return notes


def _pairs(node: Node, results: Any) -> list[tuple[Node, Node]]:
    """What a call computes, and what is read instead."""
    if isinstance(results, Node):
        return [(node, results)]
    return [(user, results[args_of(user)[1]]) for user in node.users]


def _stored(emit: Emitter, operand: Any) -> Any:
    """The codes that an operand was cast from, if it was, in the same view. A target may multiply integers of 8 bits as
    they are stored: every dtype that is multiplied holds them."""
    if not isinstance(operand, Node) or not args_of(operand) or not isinstance(args_of(operand)[0], Node):
        return operand
    source = args_of(operand)[0]
    if operand.target in CASTS:
        return source if source.meta["val"].dtype in CODES else operand
    if operand.target not in VIEWS or (codes := _stored(emit, source)) is source:
        return operand
    with emit.before(operand):
        return emit.call(operand.target, codes, *args_of(operand)[1:])


def _asked(node: Node, lowering: Lowering, operands: Sequence[Any]) -> tuple[Compiled | None, NoMatch | None]:
    try:
        return lowered(node, lowering, operands), None
    except NoMatch as refusal:
        return None, refusal


def lowered(node: Node, lowering: Lowering, operands: Sequence[Any] | None = None) -> Compiled:
    """The target's function for a call, chosen from the fake values of its arguments, or of `operands` in their place.
    Raises NoMatch if it refuses."""
    options = {name: fake_of(value) for name, value in node.kwargs.items()}
    return lowering(*map(fake_of, args_of(node) if operands is None else operands), **options)


def _replace(node: Node, pairs: Sequence[tuple[Node, Node]]) -> None:
    for old, new in pairs:
        old.replace_all_uses_with(new)
        if old is not node:
            node.graph.erase_node(old)
    node.graph.erase_node(node)
