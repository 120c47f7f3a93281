"""Integers, fills within fills, and weights that change between two calls."""

from __future__ import annotations

from random import Random

import torch
from torch.fx import Node

from .bench import ALL_USERS, Bench, InvalidError, operands, shape, tensor
from .capture import Captured
from .edits import calls
from .garbage import SOFTMAXES
from .places import places
from .scene import Mutation, mutation

aten = torch.ops.aten

# Filled as such, or in a wider type and cast, which cuts off and wraps around.
WHOLE = (
    *((1.9, "int64", "full"), (-1.5, "int64", "full"), (2.5, "int32", "full"), (3, "int64", "full")),
    *((1.9, "int64", "cast"), (300, "uint8", "cast"), (-1, "uint8", "cast"), (200, "int8", "cast")),
    (2**33 + 1, "int32", "cast"),
)
DEPTHS = (1, 2, 3, 8, 12, 24)
FACTORS = (0.01, 0.5, 1.0, -0.5)


def draw_whole(random: Random, captured: Captured) -> list[Mutation] | None:
    """Scores, norms, positions: a value is multiplied by an integer, or one is added."""
    found = places(captured.gm.graph)
    number = random.choice(WHOLE)
    if found and random.random() < 0.2:
        node, operand, _ = random.choice(found)
        return [("whole", node.name, operand, *number, "add")]
    nodes = [node for node in calls(captured.gm.graph) if tensor(node) is not None and tensor(node).is_floating_point()]
    targets = sorted({node.target for node in nodes if node.target is not aten.copy_.default}, key=str)
    target = random.choice(targets)
    node = random.choice([node for node in nodes if node.target is target])
    return [("whole", node.name, ALL_USERS, *number, random.choice(("mul", "mul", "add", "div")))]


@mutation
def whole(bench: Bench, name: str, operand: int, number: float, dtype: str, made: str, operation: str) -> None:
    targets = {"mul": aten.mul.Tensor, "add": aten.add.Tensor, "div": aten.div.Tensor}
    wide = torch.int64 if isinstance(number, int) else torch.float64

    def emit(value: Node) -> Node:
        held = bench.call(aten.full.default, [], number, dtype=getattr(torch, dtype) if made == "full" else wide)
        if made == "cast":
            held = bench.call(aten._to_copy.default, held, dtype=getattr(torch, dtype))
        return bench.call(targets[operation], value, held)

    bench.insert(name, operand, emit)


def draw_nested(random: Random, captured: Captured) -> list[Mutation] | None:
    """Scores ahead of a softmax, or any other value of many dimensions."""
    graph = captured.gm.graph
    scores = [(node.name, 0) for node in calls(graph) if node.target in SOFTMAXES]
    scores += [(operands(node)[0].name, ALL_USERS) for node in calls(graph) if node.target is aten.amax.default]
    others = [(node.name, ALL_USERS) for node in calls(graph) if tensor(node) is not None and tensor(node).dim() > 2]
    found = scores if scores and (not others or random.random() < 0.8) else others
    if not found:
        return None
    site = random.choice(found)
    form = random.choice(("where", "where", "fill", "sum", "product"))
    return [("nested", *site, random.choice(DEPTHS), random.choice(FACTORS), form)]


@mutation
def nested(bench: Bench, name: str, operand: int, depth: int, factor: float, form: str) -> None:
    """A value and itself times a number, filled where it is hidden; then the same again, and again."""
    value = bench.value(name, operand)
    size, dtype = shape(value)[-1], tensor(value).dtype
    if not tensor(value).is_floating_point():
        raise InvalidError("no numbers")

    def emit(value: Node) -> Node:
        slots = bench.call(aten.arange.default, size)
        seen = bench.call(aten.lt.Scalar, slots, max(1, size - 1))
        hidden = bench.call(aten.logical_not.default, seen)
        least = bench.call(aten.full.default, [], -torch.inf if form != "product" else 0.0, dtype=dtype)
        for _ in range(depth):
            more = bench.call(aten.add.Tensor, value, bench.call(aten.mul.Tensor, value, factor))
            if form == "product":
                more = bench.call(aten.mul.Tensor, value, bench.call(aten.add.Tensor, value, factor))
            if form == "fill":
                value = bench.call(aten.masked_fill.Scalar, more, hidden, -torch.inf)
            elif form == "where":
                value = bench.call(aten.where.self, seen, more, least)
            else:
                value = more
        return value

    bench.insert(name, operand, emit)


# --- weights ---------------------------------------------------------------------------------------------------------

HOW = ("in place", "data", "numpy", "other memory")


def draw_changed(random: Random, captured: Captured) -> list[Mutation] | None:
    given = zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    weights = [node.name for node, value in given if isinstance(value, torch.nn.Parameter) and value.dim() > 1]
    if not weights:
        return None
    names = random.sample(weights, min(len(weights), random.choice((1, 2, 4))))
    changes = [("changed", name, random.choice(HOW), random.choice((0.5, 2.0, -1.0, 1.25))) for name in names]
    return [*changes, ("run_by", random.choice(("kept", "kept", "kept", "reference", "backend")), 2)]


@mutation
def changed(bench: Bench, name: str, how: str, factor: float) -> None:
    """A weight between two calls."""
    if not bench.given(name).is_floating_point():
        raise InvalidError("no numbers")
    bench.changes.append((name, how, factor))
