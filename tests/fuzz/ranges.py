"""Numbers at the edges of a dtype: loud and quiet inputs, factors cancelled after a product."""

from __future__ import annotations

from random import Random

import torch

from .bench import Bench, InvalidError, operands
from .capture import Captured
from .edits import PRODUCTS, calls
from .scene import Mutation, mutation

aten = torch.ops.aten

FACTORS = (2.0**4, 2.0**7, 2.0**10, 2.0**13, 1e3, 1e4, 1e6)


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """One to three of these."""
    if captured.dtype == torch.float64:
        return None
    drawn = [_draw_one(random, captured) for _ in range(random.choice((1, 2, 2, 3)))]
    return [found for found in drawn if found is not None] or None


def _draw_one(random: Random, captured: Captured) -> Mutation | None:
    if random.random() < 0.5:
        return _draw_loud(random, captured)
    products = [node for node in calls(captured.gm.graph) if node.target in PRODUCTS]
    factor = random.choice(FACTORS)
    factor = factor if random.random() < 0.5 else 1 / factor
    kind = random.choice(("taken_back", "taken_back", "shared_out"))
    return (kind, random.choice(products).name, random.randrange(2), factor) if products else None


def _draw_loud(random: Random, captured: Captured) -> Mutation | None:
    given = zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    names = [node.name for node, value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
    powers = (-1, -2, -3, -4, -6, -8) if random.random() < 0.5 else (-0.5, -0.25, -0.75)
    return "loud", random.choice(names), random.choice(powers), random.random() < 0.3


@mutation
def loud(bench: Bench, name: str, power: float, is_positive: bool) -> None:
    """The largest element of an input is that of its type times two to a power; or a power of that, if below 1."""
    value = bench.given(name)
    value = value.detach().abs() if is_positive else value
    if not value.is_floating_point() or not value.numel():
        raise InvalidError("no numbers")
    limit = torch.finfo(value.dtype).max
    largest = limit * 2.0**power if power <= -1 else limit ** (1 + 2 * power)
    scaled = (value.detach().double() / value.detach().double().abs().max().clamp(min=1e-30) * largest).to(value.dtype)
    is_weight = isinstance(bench.given(name), torch.nn.Parameter)
    bench.inputs[name] = torch.nn.Parameter(scaled, requires_grad=False) if is_weight else scaled


@mutation
def taken_back(bench: Bench, name: str, operand: int, factor: float) -> None:
    """An operand of a product times a number, and the product divided by it."""
    node = bench.node(name)
    if node.target not in PRODUCTS:
        raise InvalidError("no product")
    bench.insert(name, operand, lambda value: bench.call(aten.mul.Tensor, value, factor))
    bench.insert(name, -1, lambda value: bench.call(aten.mul.Tensor, value, 1 / factor))


@mutation
def shared_out(bench: Bench, name: str, operand: int, factor: float) -> None:
    """An operand of a product times a number, and the other divided by it."""
    node = bench.node(name)
    if node.target not in PRODUCTS or len(operands(node)) != 2:
        raise InvalidError("no product")
    bench.insert(name, operand, lambda value: bench.call(aten.mul.Tensor, value, factor))
    bench.insert(name, 1 - operand, lambda value: bench.call(aten.mul.Tensor, value, 1 / factor))
