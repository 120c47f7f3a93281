"""What several readers of one value make of it, each for itself: the same, or nearly.

Places are cut off, replaced or wrapped around, and columns of tables are overwritten twice. A reading that takes what
is computed twice for one value must see a bound, a step or an order that differs."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch.fx import Node

from .bench import Bench, InvalidError, operands, shape, tensor
from .capture import Captured
from .edits import calls
from .places import places
from .scene import Mutation, mutation

aten = torch.ops.aten

Use = tuple[str, int]

ALIKE_SHARE = 0.4


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """One reader in some is unlike the others."""
    kind, uses, numbers = random.choice((_of_place, _of_table))(random, captured.gm.graph) or ("", [], [])
    if not uses:
        return None
    usual, other = random.sample(numbers, 2)
    unlike = None if random.random() < ALIKE_SHARE else random.randrange(len(uses))
    return [(kind, *use, *(other if place == unlike else usual)) for place, use in enumerate(uses)]


def _of_place(random: Random, graph: torch.fx.Graph) -> tuple[str, list[Use], list[Any]] | None:
    """All places that count through as many rows: those of several writes are often computed for each."""
    uses: dict[tuple[Any, ...], list[Use]] = {}
    for node, number, size in places(graph):
        where = tensor(operands(node)[number])
        uses.setdefault((where.shape, where.dtype, size), []).append((node.name, number))
    shared = [(size, found) for (*_, size), found in uses.items() if len(found) > 1 and size > 1]
    if not shared:
        return None
    size, found = random.choice(shared)
    return random.choice(("cut_off", "replaced", "wrapped")), found, [(1 + number,) for number in range(size)]


def _of_table(random: Random, graph: torch.fx.Graph) -> tuple[str, list[Use], list[Any]] | None:
    """All that reads a value of several columns in one way, as the tables of two rotations are read."""
    uses: dict[tuple[Node, Any], list[Use]] = {}
    for node in calls(graph):
        for number, value in enumerate(operands(node)):
            if _has_columns(value) and node.target is not aten.copy_.default:
                uses.setdefault((value, node.target), []).append((node.name, number))
    shared = [found for found in uses.values() if len(found) > 1]
    orders = [(one, other, step) for one in range(3) for other in range(3) for step in (1, 2, 3)]
    return ("written_twice", random.choice(shared), orders) if shared else None


def _has_columns(node: Node) -> bool:
    value = tensor(node)
    return value is not None and value.is_floating_point() and value.dim() > 0 and value.shape[-1] > 2


# --- places ----------------------------------------------------------------------------------------------------------


@mutation
def cut_off(bench: Bench, name: str, number: int, last: int) -> None:
    bench.insert(name, number, lambda where: bench.call(aten.clamp.default, where, None, last))


@mutation
def replaced(bench: Bench, name: str, number: int, last: int) -> None:
    """Places behind the last one are the first one."""

    def emit(where: Node) -> Node:
        none = bench.call(aten.full.default, [], 0, dtype=where.meta["val"].dtype)
        return bench.call(aten.where.self, bench.call(aten.gt.Scalar, where, last), none, where)

    bench.insert(name, number, emit)


@mutation
def wrapped(bench: Bench, name: str, number: int, size: int) -> None:
    bench.insert(name, number, lambda where: bench.call(aten.remainder.Scalar, where, size))


# --- tables ----------------------------------------------------------------------------------------------------------


@mutation
def written_twice(bench: Bench, name: str, number: int, one: int, other: int, step: int) -> None:
    """Every so many columns from one on are overwritten, then those from another on, which may be the same."""

    def emit(table: Node) -> Node:
        if not _has_columns(table):
            raise InvalidError("no columns")
        written, last, size = table, tensor(table).dim() - 1, shape(table)[-1]
        for start, factor in ((one, 0.5), (other, -1.5)):
            columns = bench.call(aten.slice.Tensor, bench.call(aten.mul.Tensor, table, factor), last, start, size, step)
            written = bench.call(aten.slice_scatter.default, written, columns, last, start, size, step)
        return written

    bench.insert(name, number, emit)
