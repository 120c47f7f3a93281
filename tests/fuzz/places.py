"""Mutations of places: block tables, slots and positions; and swaps of two values.

As in edits.py. A place is an integer operand by which something gathers, scatters or writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch.fx import Node

from .bench import ALL_USERS, Bench, operands, shape, tensor
from .edits import Edit, calls, edit, leaves, replace_leaves

aten = torch.ops.aten

CHANGES: dict[str, Edit] = {}
PRESERVING: dict[str, Edit] = {}

WRAPPING = (aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default)
AT_DIM = (aten.index_select.default, aten.index_copy.default, aten.gather.default, aten.scatter.src)

Place = tuple[Node, int, int]


def places(graph: torch.fx.Graph) -> list[Place]:
    """Users, the number of the operand that is a place, and the size of the dimension it counts through."""
    return [place for node in calls(graph) for place in _places_of(node)]


def _places_of(node: Node) -> Iterator[Place]:
    if node.target in WRAPPING:
        dims = [dim for dim, where in enumerate(node.args[1]) if where is not None]
        for number, dim in enumerate(dims, start=1):
            if not tensor(operands(node)[number]).is_floating_point():
                yield node, number, shape(node.args[0])[dim]
    elif node.target in AT_DIM:
        yield node, 1, shape(node.args[0])[node.args[1]]
    elif node.target is aten.embedding.default:
        yield node, 1, shape(node.args[0])[0]


def _drawn(random: Random, graph: torch.fx.Graph, *, wraps: bool = False) -> Place | None:
    found = [place for place in places(graph) if place[0].target in WRAPPING or not wraps]
    return random.choice(found) if found else None


def _draw_other_rows(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    """For one user alone, or for all that read the same table."""
    place = _drawn(random, graph)
    if place is None or place[2] < 2:
        return None
    node, number, size = place
    name = (node.name, number) if random.random() < 0.6 else (operands(node)[number].name, ALL_USERS)
    return (*name, random.choice((1, 1, -1, 2, size // 2)), size)


@edit(CHANGES, _draw_other_rows)
def other_rows(bench: Bench, name: str, number: int, shift: int, size: int) -> None:
    """Rows or blocks shifted by this many, around the end."""

    def moved(where: Node) -> Node:
        return bench.call(aten.remainder.Scalar, bench.call(aten.add.Tensor, where, shift), size)

    bench.insert(name, number, moved)


def _draw_other_order(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    place = _drawn(random, graph)
    dims = [dim for dim, size in enumerate(shape(operands(place[0])[place[1]])) if size > 1] if place else []
    return (place[0].name, place[1], random.choice(dims)) if place and dims else None


@edit(CHANGES, _draw_other_order)
def other_order(bench: Bench, name: str, number: int, dim: int) -> None:
    """One user goes through a table the other way."""
    bench.insert(name, number, lambda where: bench.call(aten.flip.default, where, [dim]))


def _draw_from_the_end(random: Random, graph: torch.fx.Graph) -> Place | None:
    place = _drawn(random, graph, wraps=True)
    return (place[0].name, *place[1:]) if place else None


@edit(PRESERVING, _draw_from_the_end)
def rows_from_the_end(bench: Bench, name: str, number: int, size: int) -> None:
    bench.insert(name, number, lambda where: bench.call(aten.sub.Tensor, where, size))


def _draw_in_blocks(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    """For one user alone, or for all that read the same table."""
    place = _drawn(random, graph)
    if place is None:
        return None
    node, number, _ = place
    name = (node.name, number) if random.random() < 0.5 else (operands(node)[number].name, ALL_USERS)
    return (*name, random.choice((2, 3, 4, 5)))


@edit(PRESERVING, _draw_in_blocks)
def rows_in_blocks(bench: Bench, name: str, number: int, size: int) -> None:
    """A row as its block and its offset in there, put together again."""

    def together(where: Node) -> Node:
        block = bench.call(aten.div.Tensor_mode, where, size, rounding_mode="floor")
        offset = bench.call(aten.remainder.Scalar, where, size)
        return bench.call(aten.add.Tensor, bench.call(aten.mul.Tensor, block, size), offset)

    bench.insert(name, number, together)


# --- two of a kind ---------------------------------------------------------------------------------------------------


def _draw_swap(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    """Swaps what the graph is given (biases, scales, tables, caches) or what is computed."""
    given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    nodes = given if random.random() < 0.7 else calls(graph)
    kinds: dict[Any, list[Node]] = {}
    for node in nodes:
        if tensor(node) is not None and node.users and node.target is not aten.copy_.default:
            kinds.setdefault((tensor(node).shape, tensor(node).dtype), []).append(node)
    alike = [found for found in kinds.values() if len(found) > 1]
    return tuple(node.name for node in random.sample(random.choice(alike), 2)) if alike else None


@edit(CHANGES, _draw_swap)
def swap(bench: Bench, one: str, other: str) -> None:
    """Swap the readers of two values, where both values exist by then. Writes stay where they are."""
    pair = bench.node(one), bench.node(other)
    users = [
        (user, number, pair[1 - pair.index(value)])
        for user in {user: None for value in pair for user in value.users}
        for number, value in enumerate(operands(user))
        if value in pair and not (user.target is aten.copy_.default and number == 0)
    ]
    order = {node: place for place, node in enumerate(bench.graph.nodes)}
    for user, number, value in users:
        if order[value] < order[user]:
            bench.replace_operand(user, number, value)


def _floats(graph: torch.fx.Graph) -> list[tuple[Node, int, float]]:
    found = [(node, place, leaf) for node in calls(graph) for place, leaf in enumerate(leaves(node))]
    return [(node, place, leaf) for node, place, leaf in found if isinstance(leaf, float) and abs(leaf) < 1e30]


def _draw_swap_numbers(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    floats = _floats(graph)
    if len(floats) < 2:
        return None
    (node, place, number), (other, there, instead) = random.sample(floats, 2)
    return None if number == instead else (node.name, place, instead, other.name, there, number)


@edit(CHANGES, _draw_swap_numbers)
def swap_numbers(bench: Bench, name: str, place: int, number: float, other: str, there: int, instead: float) -> None:
    """Two factors, or a factor and an epsilon, are swapped."""
    replace_leaves(bench, bench.node(name), {place: number})
    replace_leaves(bench, bench.node(other), {there: instead})
