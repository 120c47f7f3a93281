"""The tables of NPUs: the same models and spellings in bfloat16, with sizes that the vendor's kernels take, up to
torchair's input. These cells run in a process that can import torch_npu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lib.families import empty_cache, tiny_model
from lib.zoo.sizes import converted
from npu.sizes import CONFIG, CONTEXT, OF_FAMILY, SIZES

from .outcome import Outcome, outcomes
from .rows import FamilyCell, Found, ZooCell, family_cells, layers, zoo_cells
from .tables import FAMILIES_STEPS, Notes, Results, Table, Tables, fixed_and_dynamic, reasons, row, short

GE, CAPTURED = "ge", "aclgraph"
CHIP = {"soc": "Ascend910B3"}
CAPTURED_STEPS = ("prompt", "static cache")  # a growing cache is captured anew at each step


class NpuFamilyCell(FamilyCell):
    def _model(self) -> Any:
        sizes = CONFIG | OF_FAMILY.get(self.line, {})
        return tiny_model(self.line, torch.bfloat16, **sizes, **layers(self.line))

    def _cache(self, model: Any, kind: str) -> Any:
        return empty_cache(model, kind, CONTEXT)

    def _functions(self, model: Any) -> tuple[str, ...]:
        return super()._functions(model)[:1]

    def _outcomes(self, *call: Any, dynamic: bool) -> dict[str, Outcome]:
        is_captured = self.column in CAPTURED_STEPS and not dynamic
        return outcomes(*call, dynamic=dynamic, targets=(GE, CAPTURED) if is_captured else (GE,), **CHIP)


class NpuZooCell(ZooCell):
    """Masks are arguments there, and declared causal."""

    def found(self) -> list[Found]:
        entry = replace(self.entry, spelling=replace(self.entry.spelling, sizes=SIZES))
        step = entry.steps[-1]
        arguments = converted(entry.arguments(step), torch.bfloat16)
        module, options = entry.build().bfloat16(), {"targets": (GE,), "causal_masks": True, **CHIP}
        found = outcomes(module, arguments, {}, dynamic=False, **options)
        whole = self.whole(step, torch.bfloat16)
        return [Found(step.name, target, outcome, whole) for target, outcome in found.items()]


def _family_line(family: str, steps: Results, notes: Notes) -> str:
    every = [one for found in steps.values() for one in _on(GE, found)]  # a captured graph misses the same
    columns = [_with_bodies(_on(GE, part), notes) for found in steps.values() for part in fixed_and_dynamic(found)]
    captured = [_with_bodies(_on(CAPTURED, steps[step]), notes) for step in CAPTURED_STEPS]
    return row((family, *columns, *captured, notes.numbers(reasons(every))))


def _on(target: str, found: Sequence[Found]) -> list[Found]:
    return [one for one in found if one.target == target]


def _with_bodies(found: Sequence[Found], notes: Notes) -> str:
    """What fused, and the numbers of the footnotes about operators that the vendor does not support."""
    (one,) = found
    numbers = notes.numbers(one.outcome.bodies)
    return f"{one.outcome} ({numbers})" if numbers else str(one.outcome)


def _zoo_line(axis: str, spellings: Results, notes: Notes) -> str:
    less: dict[str, list[str]] = {}
    for name, (one,) in spellings.items():
        if not one.is_whole or one.outcome.bodies:
            numbers = notes.numbers([*one.outcome.reasons, *one.outcome.bodies])
            less.setdefault(f"{one.outcome} ({numbers})", []).append(short(name))
    lacking = sum(map(len, less.values()))
    parts = (f"{', '.join(names)}: {what}" for what, names in less.items())
    return row((axis, len(spellings), len(spellings) - lacking, "; ".join(parts)))


HEADS = tuple(f"{step}, captured" for step in CAPTURED_STEPS)
NPU = Tables(
    "coverage on NPUs",
    (
        Table(("family on an NPU", *FAMILIES_STEPS, *HEADS, "notes"), family_cells(NpuFamilyCell), _family_line),
        Table(("what is varied", "spellings", "whole", "less"), zoo_cells(NpuZooCell), _zoo_line),
    ),
)
