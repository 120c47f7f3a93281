"""Cache slots with NaN or huge numbers, like memory that was never written, or belonged to an earlier request.

If the program hides them, its results are finite, and the fused ones are the same."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch.fx import Node

from .bench import Bench, InvalidError, operands, shape, tensor
from .capture import Captured
from .scene import Mutation, mutation

aten = torch.ops.aten

NUMBERS = ("nan", "nan", "inf", "-inf", "6e4", "1e30", "-1e30", "3e38", "1e300", "-1e300")
SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """Mostly in slots at the end of a written cache, which masks hide; sometimes hidden by one more filter."""
    graph = captured.gm.graph
    caches = [node for node in _inputs(captured) if any(user.target is aten.copy_.default for user in node.users)]
    others = [node for node in _inputs(captured) if len(shape(node)) > 2]
    found = caches if caches and (not others or random.random() < 0.8) else others
    if not found:
        return None
    drawn = [_slots(random, node) for node in random.sample(found, min(len(found), random.choice((1, 1, 2))))]
    limit = torch.finfo(captured.dtype).max
    texts = [text for text in NUMBERS if not limit < abs(float(text)) < torch.inf]
    mutations = [("garbage", *slots, random.choice(texts)) for slots in drawn if slots is not None]
    softmaxes = [node for node in graph.nodes if node.target in SOFTMAXES]
    if mutations and softmaxes and random.random() < 0.4:
        for node in softmaxes:
            hidden = max(1, mutations[0][4] - mutations[0][3])
            mutations.append(("hide", node.name, 0, hidden, random.choice(("fill", "where"))))
    return mutations or None


def _inputs(captured: Captured) -> list[Node]:
    """Inputs of numbers that are no weights."""
    given = zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs, strict=True)
    return [
        node
        for node, value in given
        if isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and value.is_floating_point()
        and value.dim() > 1
    ]


def _slots(random: Random, node: Node) -> tuple[str, int, int, int] | None:
    """An input, and from where to where along a dimension."""
    sizes = shape(node)
    dims = [dim for dim, size in enumerate(sizes[:-1]) if size > 1]
    if not dims:
        return None
    dim = dims[-1] if random.random() < 0.7 else random.choice(dims)
    count = random.choice((1, 1, 2, 3))
    first = sizes[dim] - count if random.random() < 0.6 else random.randrange(sizes[dim])
    return node.name, dim, max(first, 0), min(first + count, sizes[dim])


@mutation
def garbage(bench: Bench, name: str, dim: int, first: int, last: int, number: str) -> None:
    value = bench.given(name).clone()
    if value.dim() <= dim or not value.is_floating_point():
        raise InvalidError("no slots")
    limit = torch.finfo(value.dtype).max
    if float(number) not in (torch.inf, -torch.inf) and abs(float(number)) > limit:
        raise InvalidError("no number of this type")
    value.narrow(dim, first, last - first).fill_(float(number))
    bench.inputs[name] = value
    bench.way = replace(bench.way, has_garbage=True)


@mutation
def hide(bench: Bench, name: str, operand: int, count: int, spelling: str) -> None:
    """The last keys are hidden by filling their scores."""
    scores = operands(bench.node(name))[operand]
    size = shape(scores)[-1]
    bench.place = bench.node(name)
    slots = bench.call(aten.arange.default, size)
    hidden = bench.call(aten.ge.Scalar, slots, size - count)
    if spelling == "fill":
        bench.insert(name, operand, lambda value: bench.call(aten.masked_fill.Scalar, value, hidden, -torch.inf))
        return
    least = bench.call(aten.full.default, [], -torch.inf, dtype=tensor(scores).dtype)
    bench.insert(name, operand, lambda value: bench.call(aten.where.self, hidden, least, value))
