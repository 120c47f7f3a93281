"""Values with one more reader: by their strides, through a view, or as a result; mostly in the second of two layers."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import torch
from torch.fx import Node

from .bench import Bench, InvalidError, tensor
from .capture import Captured
from .edits import calls
from .scene import Mutation, mutation

aten = torch.ops.aten

READINGS = ("strides", "strides", "own strides", "view", "result", "alias", "row", "sum")


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """Rare operators are as likely as views, and the last of a kind more likely than the others."""
    kinds: dict[str, list[Node]] = defaultdict(list)
    for node in calls(captured.gm.graph):
        value = tensor(node)
        if value is not None and value.is_floating_point() and value.numel() and node.target is not aten.copy_.default:
            kinds[str(node.target)].append(node)
    kinds["written"] = [
        node.args[1] for node in calls(captured.gm.graph) if node.target is aten.copy_.default
    ]  # what becomes of caches
    kinds["of written"] = [user for node in kinds["written"] for user in node.users if tensor(user) is not None]
    found = [nodes for _, nodes in sorted(kinds.items()) if nodes]
    if not found:
        return None
    nodes = random.choice(found) if random.random() < 0.7 else random.choice([kinds["of written"] or found[0]])
    node = nodes[-1] if random.random() < 0.5 else random.choice(nodes)
    if node.target is aten.copy_.default:
        return None
    runner = random.choice(("reference", "reference", "lowered"))
    return [("also_read", node.name, random.choice(READINGS)), ("run_by", runner, 1)]


@mutation
def also_read(bench: Bench, name: str, reading: str) -> None:
    node = bench.node(name)
    value = tensor(node)
    if value is None:
        raise InvalidError("no tensor")
    bench.place = bench.after(node)
    bench.output(_read(bench, node, value, reading))


def _read(bench: Bench, node: Node, value: torch.Tensor, reading: str) -> Node:
    if reading == "strides":
        dense = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return bench.call(aten.mul.Tensor, bench.call(aten.as_strided.default, node, [dense], [1]), 1.5)
    if reading == "own strides":
        strided = bench.call(aten.as_strided.default, node, list(value.shape), list(value.stride()))
        return bench.call(aten.mul.Tensor, strided, 1.5)
    if reading == "view":
        return bench.call(aten.mul.Tensor, bench.call(aten.view.default, node, [-1]), 1.5)
    if reading == "row":
        return bench.call(aten.select.int, node, 0, 0)
    if reading == "sum":
        return bench.call(aten.sum.default, node)
    return node if reading == "result" else bench.call(aten.alias.default, node)
