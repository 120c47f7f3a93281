"""Mutations other than insertions: arguments, operands, outputs, writes.

Each is `draw(random, sites)`, which returns literal parameters or None, and `apply(bench, *parameters)`. CHANGES may
change the meaning of the program, PRESERVING keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from random import Random
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from .bench import Bench, InvalidError, operands, shape, tensor
from .insertions import flip, riffle, rotate

aten = torch.ops.aten


@dataclass(frozen=True)
class Edit:
    draw: Callable[[Random, Any], tuple[Any, ...] | None]
    apply: Callable[..., None]


CHANGES: dict[str, Edit] = {}
PRESERVING: dict[str, Edit] = {}

PRODUCTS = (aten.mm.default, aten.bmm.default)
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


def edit(kinds: dict[str, Edit], draw: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(apply: Callable[..., None]) -> Callable[..., None]:
        kinds[apply.__name__] = Edit(draw, apply)
        return apply

    return register


def calls(graph: torch.fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def named(random: Random, nodes: list[Node]) -> tuple[Any, ...] | None:
    return (random.choice(nodes).name,) if nodes else None


# --- arguments -------------------------------------------------------------------------------------------------------


def leaves(node: Node) -> list[Any]:
    """The arguments of a node that are not operands, in order."""
    found: list[Any] = []
    map_aggregate((node.args, node.kwargs), lambda leaf: found.append(leaf))
    return found


def _numbers(node: Node) -> list[int]:
    return [place for place, leaf in enumerate(leaves(node)) if isinstance(leaf, (bool, int, float))]


def _draw_argument(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    nodes = [node for node in calls(graph) if node.target is not getitem and _numbers(node)]
    targets = sorted({node.target for node in nodes}, key=str)
    if not targets:
        return None
    target = random.choice(targets)
    node = random.choice([node for node in nodes if node.target is target])
    place = random.choice(_numbers(node))
    old = leaves(node)[place]
    if isinstance(old, bool):
        return node.name, place, not old
    if isinstance(old, float):
        number = random.choice((-old, 0.0, 2 * old, old + 0.5, -1e4))
        return (node.name, place, number) if abs(number) < 1e300 else None
    if abs(old) > 2**40:
        return node.name, place, random.choice((-1, 1, 2))
    return node.name, place, random.choice((old + 1, old - 1, -old, 0, 2 * old, old - 32))


@edit(CHANGES, _draw_argument)
def argument(bench: Bench, name: str, place: int, number: Any) -> None:
    replace_leaves(bench, bench.node(name), {place: number})


def _draw_two_arguments(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    """Two sizes of a view, two dimensions of a permutation, or both bounds of a slice moved together."""
    nodes = [node for node in calls(graph) if len(set(_numbers(node))) > 1]
    if not nodes:
        return None
    node = random.choice(nodes)
    if node.target in (aten.slice.Tensor, aten.slice_scatter.default) and len(_numbers(node)) > 2:
        dim, start, end = _numbers(node)[:3]
        shift = random.choice((-1, 1, 2))
        size = shape(operands(node)[0])[leaves(node)[dim]]
        bounds = leaves(node)[start] + shift, min(leaves(node)[end], size) + shift
        return (node.name, start, bounds[0], end, bounds[1]) if bounds[0] >= 0 and bounds[1] <= size else None
    first, second = random.sample(_numbers(node), 2)
    old = leaves(node)
    return None if old[first] == old[second] else (node.name, first, old[second], second, old[first])


@edit(CHANGES, _draw_two_arguments)
def two_arguments(bench: Bench, name: str, first: int, one: Any, second: int, other: Any) -> None:
    replace_leaves(bench, bench.node(name), {first: one, second: other})


def replace_leaves(bench: Bench, node: Node, new: dict[int, Any]) -> None:
    numbers = iter(range(len(leaves(node))))

    def replaced(leaf: Any) -> Any:
        place = next(numbers)
        return new.get(place, leaf)

    node.args, node.kwargs = map_aggregate((node.args, node.kwargs), replaced)
    bench.changed.add(node)


def _draw_wrapped(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    node = random.choice(calls(graph))
    wrapped = WRAPPED.get(node.target)
    if wrapped is None or len(node.args) <= wrapped[-1]:
        return None
    number = random.choice(wrapped)
    return (node.name, number) if isinstance(node.args[number], int) and 0 <= node.args[number] < 2**40 else None


# The number of the dimension among the arguments, and positions along it.
WRAPPED = {
    aten.slice.Tensor: (1, 2, 3),
    aten.select.int: (1, 2),
    aten.slice_scatter.default: (2, 3, 4),
    aten.select_scatter.default: (2, 3),
    aten.index_copy.default: (1,),
    aten.cat.default: (1,),
    aten.transpose.int: (1,),
    aten._softmax.default: (1,),
}


@edit(PRESERVING, _draw_wrapped)
def count_from_the_end(bench: Bench, name: str, number: int) -> None:
    """A dimension or a position as a negative number."""
    node = bench.node(name)
    sizes, dim = shape(operands(node)[0]), node.args[WRAPPED[node.target][0]]
    whole = len(sizes) if number == WRAPPED[node.target][0] else sizes[dim]
    if not 0 <= node.args[number] < whole:
        raise InvalidError("no position inside")
    node.args = (*node.args[:number], node.args[number] - whole, *node.args[number + 1 :])
    bench.changed.add(node)


# --- operands --------------------------------------------------------------------------------------------------------


def _alike(one: Node, other: Node) -> bool:
    mine, theirs = tensor(one), tensor(other)
    return mine is not None and theirs is not None and (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def _draw_operand(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    user = random.choice(calls(graph))
    if user.target is getitem or not operands(user):
        return None
    number = random.randrange(len(operands(user)))
    if user.target is aten.copy_.default and number == 0:
        return None
    old = operands(user)[number]
    order = {node: place for place, node in enumerate(graph.nodes)}
    others = [node for node in graph.nodes if order[node] < order[user] and node is not old and _alike(node, old)]
    return (user.name, number, random.choice(others).name) if others else None


@edit(CHANGES, _draw_operand)
def operand(bench: Bench, name: str, number: int, other: str) -> None:
    """Another value of the same shape is read."""
    bench.replace_operand(bench.node(name), number, bench.node(other))


def _draw_exchange(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    users = [node for node in calls(graph) if len(operands(node)) > 1 and node.target not in COMMUTATIVE]
    users = [node for node in users if node.target is not aten.copy_.default]
    if not users:
        return None
    user = random.choice(users)
    first, second = sorted(random.sample(range(len(operands(user))), 2))
    return user.name, first, second


@edit(CHANGES, _draw_exchange)
def exchange(bench: Bench, name: str, first: int, second: int) -> None:
    """Two operands of one node are swapped."""
    node = bench.node(name)
    one, other = operands(node)[first], operands(node)[second]
    bench.replace_operand(node, first, other)
    bench.replace_operand(node, second, one)


@edit(PRESERVING, lambda random, graph: named(random, [node for node in calls(graph) if node.target in COMMUTATIVE]))
def commute(bench: Bench, name: str) -> None:
    node = bench.node(name)
    if not isinstance(node.args[1], Node) or "alpha" in node.kwargs:
        raise InvalidError("not two operands")
    node.args = (node.args[1], node.args[0])
    bench.changed.add(node)


def _draw_shared(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    nodes = [node for node in calls(graph) if tensor(node) is not None and len(node.users) > 1]
    return named(random, nodes)


@edit(PRESERVING, _draw_shared)
def duplicate(bench: Bench, name: str) -> None:
    """The last reader of a value reads a copy that is computed again."""
    node = bench.node(name)
    user = list(node.users)[-1]
    bench.place = bench.after(node)
    again = bench.call(node.target, *node.args, **node.kwargs)
    for number, value in enumerate(operands(user)):
        if value is node:
            bench.replace_operand(user, number, again)


# --- outputs and inputs ----------------------------------------------------------------------------------------------


def _draw_result(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    return named(random, [node for node in calls(graph) if tensor(node) is not None and node.users])


@edit(CHANGES, _draw_result)
def give_back(bench: Bench, name: str) -> None:
    """An intermediate value is returned, too."""
    bench.output(bench.node(name))


def _written(graph: torch.fx.Graph) -> list[Node]:
    return [node.args[0] for node in calls(graph) if node.target is aten.copy_.default]


READS = ("whole", "slice", "select", "split", "unbind", "unfold", "view")


def _draw_late_read(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    caches = _written(graph)
    if not caches:
        return None
    cache = random.choice(caches)
    dims = [dim for dim, size in enumerate(shape(cache)) if size > 2]
    return (cache.name, random.choice(READS), random.choice(dims), random.random() < 0.5) if dims else None


@edit(CHANGES, _draw_late_read)
def late_read(bench: Bench, name: str, spelling: str, dim: int, is_viewed_early: bool) -> None:
    """The old content of a cache is read at the end, sometimes through a view taken first."""
    cache = bench.node(name)
    bench.place = bench.after(cache) if is_viewed_early else bench.end()
    view = _read(bench, cache, spelling, dim)
    bench.place = bench.end()
    bench.output(bench.call(aten.mul.Tensor, view, 1.5))


def _read(bench: Bench, cache: Node, spelling: str, dim: int) -> Node:
    size = shape(cache)[dim]
    if spelling == "slice":
        return bench.call(aten.slice.Tensor, cache, dim, 1, size)
    if spelling == "select":
        return bench.call(aten.select.int, cache, dim, size - 2)
    if spelling == "split":
        return bench.call(getitem, bench.call(aten.split.Tensor, cache, size // 2, dim), 0)
    if spelling == "unbind":
        return bench.call(getitem, bench.call(aten.unbind.int, cache, dim), size // 2)
    if spelling == "unfold":
        return bench.call(aten.unfold.default, cache, dim, 2, 1)
    return bench.view(cache, [-1]) if spelling == "view" else cache


@edit(CHANGES, lambda random, graph: named(random, [n for n in calls(graph) if n.target is aten.copy_.default]))
def forget_write(bench: Bench, name: str) -> None:
    """A cache is not written."""
    bench.graph.erase_node(bench.node(name))


# --- two operands at once --------------------------------------------------------------------------------------------

ORDERS = {"flip": flip, "rotate": rotate, "riffle": riffle}


def _draw_columns(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    products = [node for node in calls(graph) if node.target in PRODUCTS and shape(operands(node)[0])[-1] > 2]
    if not products:
        return None
    node, order = random.choice(products), random.choice(sorted(ORDERS))
    size = shape(operands(node)[0])[-1]
    if order == "flip":
        return node.name, order
    numbers = [number for number in range(2, size) if order == "rotate" or size % number == 0]
    return (node.name, order, random.choice(numbers)) if numbers else None


@edit(PRESERVING, _draw_columns)
def columns(bench: Bench, name: str, order: str, *number: int) -> None:
    """Both operands of a product in another order along the dimension that is summed over."""
    node = bench.node(name)
    last = tensor(node).dim() - 1
    for side, dim in ((0, last), (1, last - 1)):
        bench.insert(name, side, lambda value, dim=dim: ORDERS[order](bench, value, dim, *number))


def _draw_balance(random: Random, graph: torch.fx.Graph) -> tuple[Any, ...] | None:
    products = [node for node in calls(graph) if node.target in PRODUCTS]
    return (random.choice(products).name, random.choice((-1.0, 2.0, 0.25))) if products else None


@edit(PRESERVING, _draw_balance)
def balance(bench: Bench, name: str, factor: float) -> None:
    """One operand of a product times a number, the other divided by it."""
    bench.insert(name, 0, lambda value: bench.call(aten.mul.Tensor, value, factor))
    bench.insert(name, 1, lambda value: bench.call(aten.div.Tensor, value, factor))
