"""Numbers that a model keeps and rewrites at each call, called several times in a row.

Numbers of the program become 0-d tensors: inputs, parameters, or what the graph holds itself, as a package does."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch.fx import Graph, Node

from .bench import Bench, InvalidError, tensor
from .capture import Captured
from .edits import calls, leaves, replace_leaves
from .places import places
from .scene import Mutation, mutation

aten = torch.ops.aten

# Operators that take a number where they take a tensor, too.
TAKING = {
    **{target: target for target in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor)},
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
}
CALLS = (2, 2, 3)
HOLDERS = ("input", "held", "held", "parameter")


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """A number of the program, a count of rows or of calls, or a cache, kept in one way or another."""
    graph = captured.gm.graph
    numbers, found = _numbers(graph), places(graph)
    written = [node.args[0] for node in calls(graph) if node.target is aten.copy_.default]
    kinds = {"number": numbers, "position": found, "written": written, "counter": graph}
    choices = [name for name, there in kinds.items() if there]
    choice = random.choices(choices, [3 if name == "number" else 1 for name in choices])[0]
    holder, name = random.choice(HOLDERS), "state"
    mutations: list[Mutation] = []
    if choice == "number":
        node, place = random.choice(numbers)
        factor = random.choice((0.5, 1.25, 2.0, 3.0))
        mutations.append(("number_kept", node.name, place, factor, random.random() < 0.5))
    elif choice == "counter":
        mutations.append(("counter", random.choice((1, 2, -1))))
    elif choice == "position":
        node, number, _ = random.choice(found)
        mutations.append(("position_counted", node.name, number, random.choice((1, -1))))
    else:
        name = random.choice(written).name
    if holder != "input":
        mutations.append((holder, name))
    mutations.append(("run_by", random.choice(("reference", "reference", "lowered", "verified")), random.choice(CALLS)))
    return mutations


def _numbers(graph: Graph) -> list[tuple[Node, int]]:
    return [
        (node, place)
        for node in calls(graph)
        if node.target in TAKING and tensor(node) is not None and tensor(node).is_floating_point()
        for place, leaf in enumerate(leaves(node))
        if isinstance(leaf, float)
    ]


@mutation
def number_kept(bench: Bench, name: str, place: int, factor: float, is_late: bool) -> None:
    """A number is a tensor without dimensions, multiplied at each call: ahead of its reader, or behind it."""
    node = bench.node(name)
    number = leaves(node)[place]
    if node.target not in TAKING or not isinstance(number, float):
        raise InvalidError("no number")
    state = bench.new_input("state", torch.tensor(number, dtype=tensor(node).dtype))
    bench.place = bench.after(state)
    following = bench.call(aten.mul.Tensor, state, factor)
    node.target = TAKING[node.target]
    replace_leaves(bench, node, {place: state if is_late else following})
    bench.write(state, following)


@mutation
def position_counted(bench: Bench, name: str, number: int, step: int) -> None:
    """Rows or blocks are shifted by this many at each call."""
    state = bench.new_input("state", torch.tensor(0))
    bench.insert(name, number, lambda where: bench.call(aten.add.Tensor, where, state))
    bench.place = bench.end()
    bench.write(state, bench.call(aten.add.Tensor, state, step))


@mutation
def counter(bench: Bench, step: int) -> None:
    """Calls are counted, which changes nothing else."""
    state = bench.new_input("state", torch.tensor(0))
    bench.place = bench.end()
    bench.write(state, bench.call(aten.add.Tensor, state, step))


@mutation
def held(bench: Bench, name: str) -> None:
    """An input is a tensor in the graph itself."""
    bench.hold(name)


@mutation
def parameter(bench: Bench, name: str) -> None:
    value: Any = bench.given(name)
    bench.inputs[name] = torch.nn.Parameter(value.detach().clone(), requires_grad=False)
