"""Mutants as data: a list of mutations for a captured graph, drawn at random, and the graph that they make."""

from __future__ import annotations

import functools
from collections import defaultdict
from random import Random

import torch
from torch.fx import Graph, Node

from . import edits, insertions, places
from .bench import ALL_USERS, Bench, InvalidError, operands, tensor
from .capture import Captured
from .program import Program
from .scene import MUTATIONS, Mutation
from .scenes import SCENES

aten = torch.ops.aten

Site = tuple[Node, int]

INSERTIONS = {**insertions.CHANGES, **insertions.IDENTITIES}
EDITS = {**edits.CHANGES, **edits.PRESERVING, **places.CHANGES, **places.PRESERVING}
CHANGING = (*insertions.CHANGES, *edits.CHANGES, *places.CHANGES)
PRESERVING = (*insertions.IDENTITIES, *edits.PRESERVING, *places.PRESERVING)
OFTEN = {
    **dict.fromkeys(("scale", "exchange_dims", "other_rows"), 3),
    **dict.fromkeys(("riffle", "late_read", "operand", "argument", "two_arguments"), 2),
    **dict.fromkeys(("other_order", "swap", "swap_numbers"), 2),
}
KINDS_TRIED, SITES_TRIED = 10, 30
SHARED, SHARED_SHARE = "one use of a value that has others", 0.25  # what must be alike becomes different there


@functools.cache
def sites(graph: Graph) -> dict[str, list[Site]]:
    """A place to insert something, chosen by operator, so that rare operators are as likely as views."""
    found: dict[str, list[Site]] = defaultdict(list)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "call_function") and tensor(node) is not None and node.users:
            found[f"{node.op if node.op != 'call_function' else node.target}"].append((node, ALL_USERS))
        for number, operand in enumerate(operands(node) if node.op == "call_function" else ()):
            if tensor(operand) is not None and (node.target is not aten.copy_.default or number == 1):
                found[f"into {node.target}"].append((node, number))
                if len(operand.users) > 1:
                    found[SHARED].append((node, number))
        if node.op == "placeholder" and tensor(node) is not None and tensor(node).dim() == 1 and node.users:
            found["vector"].append((node, ALL_USERS))
    return dict(sorted(found.items()))


def draw(random: Random, captured: Captured, *, preserving: bool) -> list[Mutation]:
    """One to three mutations. A mutant that changes meaning may include identities."""
    number = random.choice((1, 1, 1, 2, 2, 3))
    kinds = [PRESERVING if preserving or (place and random.random() < 0.4) else CHANGING for place in range(number)]
    return [_draw_one(random, captured.gm.graph, kind) for kind in kinds]


def draw_scene(random: Random, captured: Captured, scene: str | None = None) -> list[Mutation]:
    """A scene with this name, or any, and sometimes another mutation before it."""
    for _ in range(SITES_TRIED):
        name = scene or random.choice(list(SCENES))
        found = SCENES[name](random, captured)
        if found is not None:
            kinds = random.choice((CHANGING, PRESERVING))
            before = [_draw_one(random, captured.gm.graph, kinds)] if random.random() < 0.25 else []
            return [*before, *found]
    raise InvalidError("no scene applies")


def _draw_one(random: Random, graph: Graph, kinds: tuple[str, ...]) -> Mutation:
    for _ in range(KINDS_TRIED):
        (kind,) = random.choices(kinds, [OFTEN.get(kind, 1) for kind in kinds])
        for _ in range(SITES_TRIED):
            parameters = EDITS[kind].draw(random, graph) if kind in EDITS else _draw_insertion(random, graph, kind)
            if parameters is not None:
                return (kind, *parameters)
    raise InvalidError("no mutation applies")


def _draw_insertion(random: Random, graph: Graph, kind: str) -> Mutation | None:
    groups = sites(graph)
    group = SHARED if SHARED in groups and random.random() < SHARED_SHARE else random.choice(list(groups))
    node, operand = random.choice(groups[group])
    value = tensor(node if operand == ALL_USERS else operands(node)[operand])
    parameters = INSERTIONS[kind].draw(random, value)
    return None if parameters is None else (node.name, operand, *parameters)


def mutate(captured: Captured, mutations: list[Mutation]) -> Program:
    """The graph with mutations applied in order. Raises InvalidError if that is not a program."""
    bench = Bench(captured)
    for mutation in mutations:
        try:
            _apply(bench, mutation)
            bench.settle()
        except InvalidError:
            raise
        except Exception as error:
            raise InvalidError(f"{mutation}: {type(error).__name__}: {error}") from error
    return bench.program()


def _apply(bench: Bench, mutation: Mutation) -> None:
    kind, *parameters = mutation
    if kind in MUTATIONS:
        MUTATIONS[kind](bench, *parameters)
        return
    if kind in EDITS:
        EDITS[kind].apply(bench, *parameters)
        return
    name, operand, *rest = parameters
    bench.insert(name, operand, lambda value: INSERTIONS[kind].emit(bench, value, *rest))
