"""Positions, offsets and blocks out of range: the program raises, and leaves its caches unchanged."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from .bench import ALL_USERS, Bench, InvalidError, operands
from .capture import Captured, run
from .places import places
from .program import Program, observe
from .scene import Mutation, mutation

aten = torch.ops.aten


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """One number of an input, or all that one user or every user reads."""
    found = places(captured.gm.graph)
    if not found:
        return None
    node, number, size = random.choice(found)
    far = random.choice((-size - 3, -size - 1, -size, -1, size, size + 1, size + 3, 2 * size))
    inputs = [node for node, value in zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
              if isinstance(value, Tensor) and _is_whole(value) and value.numel()]  # fmt: skip
    if inputs and random.random() < 0.5:
        given = random.choice(inputs)
        count = given.meta["val"].numel()
        return [("position", given.name, random.randrange(count), far)]
    where = (node.name, number) if random.random() < 0.6 else (operands(node)[number].name, ALL_USERS)
    return [("shifted", *where, random.choice((far, far, 1, -1, 2, -2)))]


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool


@mutation
def position(bench: Bench, name: str, place: int, number: int) -> None:
    """One of the numbers that the program is given."""
    value = bench.given(name).clone()
    if not 0 <= place < value.numel() or not _is_whole(value):
        raise InvalidError("no position")
    value.view(-1)[place] = number
    bench.inputs[name] = value


@mutation
def shifted(bench: Bench, name: str, number: int, distance: int) -> None:
    bench.insert(name, number, lambda where: bench.call(aten.add.Tensor, where, distance))


# --- what the program leaves -----------------------------------------------------------------------------------------


def states(program: Program) -> list[Tensor]:
    """What is computed if everything out of range is left out; a program may have written some of it."""
    seen: list[Tensor] = []
    observe(program, lambda *inputs: run(program.gm, inputs, LENIENT, seen))
    return seen


def _roomy(cache: Tensor, index: list[Tensor | None], rows: Tensor, accumulate: bool = False) -> Tensor:
    """`index_put` into a cache with room for rows out of range, which is cut off again."""
    room = cache
    inside: list[Tensor | None] = []
    for dim, where in enumerate(index):
        if where is None or where.dtype == torch.bool:
            inside.append(where)
            continue
        size = cache.shape[dim]
        inside.append(torch.where((where < -size) | (where >= size), size, where % size))
        room = torch.cat((room, room.narrow(dim, 0, 1)), dim)
    written = aten.index_put.default(room, inside, rows, accumulate)
    for dim, size in enumerate(cache.shape):
        written = written.narrow(dim, 0, size)
    return written.contiguous()


def _roomy_copy(cache: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    size, dim = cache.shape[dim], dim % cache.dim()
    room = torch.cat((cache, cache.narrow(dim, 0, 1)), dim)
    inside = torch.where((index < 0) | (index >= size), size, index)
    return aten.index_copy.default(room, dim, inside, rows).narrow(dim, 0, size).contiguous()


def _index(value: Tensor, index: list[Tensor | None]) -> Tensor:
    return aten.index.Tensor(
        value,
        [
            where if where is None or where.dtype == torch.bool else where.clamp(-size, size - 1)
            for where, size in zip(index, value.shape, strict=False)
        ],
    )


LENIENT: dict[Any, Any] = {
    aten.index_put.default: _roomy,
    aten.index_copy.default: _roomy_copy,
    aten.index.Tensor: _index,
    aten.index_select.default: lambda value, dim, index: aten.index_select.default(
        value, dim, index.clamp(0, value.shape[dim] - 1)
    ),
    aten.gather.default: lambda value, dim, index: aten.gather.default(
        value, dim, index.clamp(0, value.shape[dim] - 1)
    ),
    aten.embedding.default: lambda weight, index, *rest: aten.embedding.default(
        weight, index.clamp(0, weight.shape[0] - 1), *rest
    ),
}
