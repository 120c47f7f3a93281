"""Wrong choices in what runs, beyond what rounding may flip: `verify` must find them, if they change anything.

A code of a token is off by steps, or a key is chosen that is not among the best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from .bench import Bench
from .capture import Captured
from .edits import calls
from .scene import Mutation, mutation

aten = torch.ops.aten

CHOOSING = {str(target): target for target in (aten.round.default, aten.topk.default)}
STEPS = {torch.float64: (1, -1, 2, -2), torch.float32: (2, -2)}  # in fewer digits many codes are open


def draw(random: Random, captured: Captured) -> list[Mutation] | None:
    found = sorted({str(node.target) for node in calls(captured.gm.graph)} & CHOOSING.keys())
    if not found or captured.dtype not in STEPS:
        return None
    return [("flawed", random.choice(found), random.randrange(1000), random.choice(STEPS[captured.dtype]))]


@mutation
def flawed(bench: Bench, operator: str, place: int, by: int) -> None:
    """All calls of one operator return one wrong choice."""
    bench.way = replace(bench.way, runner="flawed", flaw=(operator, place, by))


def flaw(operator: str, place: int, by: int) -> tuple[Any, Callable[[Any], Any]]:
    """The operator, and what becomes of its result."""

    def moved(codes: Tensor) -> Tensor:
        codes = codes.clone(memory_format=torch.contiguous_format)
        codes.view(-1)[place % codes.numel()] += by
        return codes

    def exchanged(best: Any) -> tuple[Tensor, Tensor]:
        values, places = best
        places = places.clone(memory_format=torch.contiguous_format)
        row = places.view(-1, places.shape[-1])[place % (places.numel() // places.shape[-1])]
        row[place % len(row)] = min({*range(len(row) + 1)} - {*row.tolist()})
        return values, places

    target = CHOOSING[operator]
    return target, moved if target is aten.round.default else exchanged
