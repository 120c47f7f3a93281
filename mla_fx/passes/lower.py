"""Replaces the fused operators of a graph by the plain functions that a target has for them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import fused_name
from mla_fx.graph.torch_private import OpOverload, tree_leaves
from mla_fx.ops.common.define import NAMESPACE
from mla_fx.readings.calls import CASTS, args_of
from mla_fx.readings.element import is_parameter
from mla_fx.readings.views import RESHAPES
from mla_fx.rewriting.draft import Change, Draft, fake_of, is_value
from mla_fx.rewriting.emitter import Apply, Emitter
from mla_fx.target import Compiled, Instead, Lowering

aten = torch.ops.aten
CODES = (torch.int8, torch.uint8)
VIEWS = RESHAPES | {aten.permute.default, aten.slice.Tensor, aten.select.int}


def lower(
    graph: Graph,
    lowerings: Mapping[OpOverload, Lowering],
    decompositions: Any,
    apply: Apply,
    bodies: Mapping[OpOverload, Lowering],
) -> Counter[str]:
    """Replace calls by plain functions: those of `lowerings`, or of `bodies` where there are none, or these refuse. A
    call whose plan is refused stays.

    Returns notes for the report with their counts: why calls were not lowered, and how plain operators are computed."""
    emit, notes = Emitter(graph), Counter[str]()
    for operator in {**bodies, **lowerings}:
        lowering, is_fused = lowerings.get(operator, unlowered), operator.namespace == NAMESPACE
        faults = NoMatch if operator in lowerings else Exception  # of a user's own body
        for node in graph.find_nodes(op="call_function", target=operator):
            name = fused_name(node) or operator._opname
            operands: Sequence[Any] = args_of(node)
            known: dict[str, Any] = {}
            if not is_fused:
                known["are_parameters"] = [_is_parameter(operand) for operand in operands]
                operands = [_stored(emit, operand) for operand in operands]
            function, refusal = _asked(node, lowering, operands, known)
            if refusal is not None and operator in bodies:
                function, _ = _asked(node, bodies[operator], operands, {})
            if refusal is not None and is_fused:
                outcome = "stays a call" if function is None else "becomes its body"
                notes[f"{name} {outcome}: {refusal.reason}"] += 1
            if function is None:
                continue
            if isinstance(function, Instead):
                notes[f"{name}: {function.reason}"] += 1
                function = function.function
            try:
                with emit.at(node, "lower"):
                    results = emit.inlined(function, *operands, decompositions=decompositions, **node.kwargs)
                    read = {value for operand in tree_leaves(operands) if isinstance(value := _read(operand), Node)}
                    plan = Change.of(_pairs(node, results), read)
                    apply(emit, f"the lowering of {name}", plan)
            except faults as error:
                notes[f"{name} stays a call: {told(error)}"] += 1
                continue
            if not is_fused:
                notes[f"{name} is computed as {function.__name__}"] += 1
    return notes


def told(error: Exception) -> str:
    return error.reason if isinstance(error, NoMatch) else f"{type(error).__name__}: {error}"


def unlowered(*args: Any, **kwargs: Any) -> NoReturn:
    raise NoMatch("it has no lowering")


def _pairs(node: Node, results: Any) -> list[tuple[Node, Draft | Node]]:
    """What a call computes, and what is read instead."""
    if is_value(results):
        return [(node, results)]
    return [(user, results[args_of(user)[1]]) for user in node.users]


def _read(operand: Any) -> Any:
    """The value of the graph that an operand is drafted from."""
    return _read(operand.operands[0]) if isinstance(operand, Draft) else operand


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
    return emit.call(operand.target, codes, *args_of(operand)[1:])


def _is_parameter(operand: Any) -> bool:
    """Whether an operand is a graph input or attribute, or a view of one."""
    while isinstance(operand, Node) and operand.target in VIEWS:
        operand = args_of(operand)[0]
    return isinstance(operand, Node) and is_parameter(operand)


def _asked(
    node: Node, lowering: Lowering, operands: Sequence[Any], known: Mapping[str, Any]
) -> tuple[Compiled | None, NoMatch | None]:
    try:
        return lowered(node, functools.partial(lowering, **known), operands), None
    except NoMatch as refusal:
        return None, refusal


def lowered(call: Node | Draft, lowering: Lowering, operands: Sequence[Any] | None = None) -> Compiled:
    """The target's function for a call, chosen from the fake values of its arguments, or of `operands` in their place.
    Raises NoMatch if it refuses."""
    options = {name: fake_of(value) for name, value in call.kwargs.items()}
    return lowering(*map(fake_of, call.args if operands is None else operands), **options)
