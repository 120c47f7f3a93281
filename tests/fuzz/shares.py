"""How a softmax shares its weight: one key has nearly all of it, all keys are alike, or a row sees one key or none."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from .bench import Bench, InvalidError
from .capture import Captured
from .scene import Mutation, mutation

SHARP, ALIKE = (60.0, 300.0, 1e3), (1e-3, 1e-6)


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    """A weight or a cache is larger or smaller, rows of a mask hide all but one key or all keys, or both."""
    given = dict(
        zip((node.name for node in captured.gm.graph.find_nodes(op="placeholder")), captured.inputs, strict=True)
    )
    numbers = {name: value for name, value in given.items() if _is_number(value)}
    masks = [name for name, value in numbers.items() if (value == -torch.inf).any()]
    others = [name for name, value in numbers.items() if value.dim() > 1 and name not in masks]
    scaled = ("times", random.choice(others), random.choice(random.choice((SHARP, ALIKE)))) if others else None
    rows = ("sees", random.choice(masks), random.randrange(64), random.choice((0, 1, 1))) if masks else None
    drawn = random.choice(([scaled], [scaled], [rows], [scaled, rows]))
    return [one for one in drawn if one is not None] or None


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.itemsize > 1


@mutation
def times(bench: Bench, name: str, factor: float) -> None:
    value = bench.given(name)
    if not value.is_floating_point() or value.itemsize == 1:
        raise InvalidError("no numbers")
    scaled = (value.detach() * factor).to(value.dtype)
    is_weight = isinstance(value, torch.nn.Parameter)
    bench.inputs[name] = torch.nn.Parameter(scaled, requires_grad=False) if is_weight else scaled


@mutation
def sees(bench: Bench, name: str, row: int, keys: int) -> None:
    """A row of a mask hides all keys but the first that it shows, or all."""
    mask = bench.given(name).clone()
    if not mask.is_floating_point() or mask.dim() < 2:
        raise InvalidError("no mask")
    rows = mask.view(-1, mask.shape[-1])
    seen = (rows[row % len(rows)] > -torch.inf).nonzero().flatten()[:keys]
    kept = rows[row % len(rows)][seen]
    rows[row % len(rows)] = -torch.inf
    rows[row % len(rows), seen] = kept
    bench.inputs[name] = mask
