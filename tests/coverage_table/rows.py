"""What runs: for each line and column of the tables, one module in several variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from lib.families import COUNTS_FLAGS, FAMILIES, empty_cache, tiny_model, tokens
from lib.zoo.entries import CLASSICS, COMPOSED, MIXED, Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import Step, converted, unequal

from .outcome import Outcome, outcomes

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Fused = dict[str, int]


@dataclass(frozen=True)
class Found:
    """What one variant gave on one target, and what it is if everything fuses, if that is known."""

    variant: str
    target: str
    outcome: Outcome
    whole: Fused | None = None

    @property
    def is_whole(self) -> bool:
        return self.outcome.fused == self.whole

    @property
    def is_dynamic(self) -> bool:
        return self.variant == DYNAMIC


DYNAMIC = "dynamic sizes"
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FamilyCell:
    """A family of transformers at one kind of step, with each of its attention functions, shapes fixed or not."""

    line: str
    column: str

    def found(self) -> list[Found]:
        model, results = self._model(), []
        functions = self._functions(model)
        for attention, dynamic in (*((name, False) for name in functions), (functions[0], True)):
            model.set_attn_implementation(attention)
            name = DYNAMIC if dynamic else attention
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=self.line in COUNTS_FLAGS):
                found = self._outcomes(*self._call(model), dynamic=dynamic)
            results += [Found(name, target, outcome) for target, outcome in found.items()]
        return results

    def _model(self) -> Any:
        return tiny_model(self.line, **layers(self.line))

    def _functions(self, model: Any) -> tuple[str, ...]:
        return ("sdpa", "eager") if model._supports_sdpa else ("eager",)

    def _outcomes(self, *call: Any, dynamic: bool) -> dict[str, Outcome]:
        return outcomes(*call, dynamic=dynamic)

    def _cache(self, model: Any, kind: str) -> Any:
        return empty_cache(model, kind)

    @torch.no_grad()
    def _call(self, model: Any) -> Call:
        kind, before, now = STEPS[self.column]
        cache = self._cache(model, kind)
        model(tokens(2, before or 1), past_key_values=cache)
        if not before:
            cache.reset()  # created by a first step; otherwise the model would compile it into its first graph
        return model, (tokens(2, now),), {"past_key_values": cache}


# Families whose layers have several kinds of latent attention, or two attentions that count as two layers.
SEVERAL = {"mistral_large4": 2, "dots3_note": 2, "longcat_flash": 2}


def layers(family: str) -> dict[str, Any]:
    """A layer of each kind of latent attention, and nothing else: experts and linear attention take long to trace."""
    count = SEVERAL.get(family, 1)
    dense = {"first_k_dense_replace": count, "mlp_layer_types": ["dense"] * count}
    return {"num_hidden_layers": count, **dense}


# The kind of cache, the tokens in it, and the new ones.
STEPS = {"prompt": ("static", 0, 12), "static cache": ("static", 12, 1), "growing cache": ("dynamic", 12, 1)}


@dataclass(frozen=True)
class ZooCell:
    """A spelling of the zoo at each of its steps, each in another precision, and at the last with dynamic sizes."""

    line: str
    place: int

    @property
    def column(self) -> str:
        return self.entry.name

    @property
    def entry(self) -> Entry:
        return AXES[self.line][self.place]

    def found(self) -> list[Found]:
        *_, last = steps = self.entry.steps
        variants = zip_longest(steps, PRECISIONS, fillvalue=last)
        results = [found for step, dtype in variants for found in self._at(step, dtype)]
        return results + self._at(unequal(last), torch.float32, dynamic=True)

    def _at(self, step: Step, dtype: torch.dtype, *, dynamic: bool = False) -> list[Found]:
        module, arguments = self.entry.build().to(dtype), converted(self.entry.arguments(step), dtype)
        name = f"{step.name}, {'dynamic' if dynamic else str(dtype).removeprefix('torch.')}"
        found = outcomes(module, arguments, {}, dynamic=dynamic)
        whole = self.whole(step, dtype, dynamic=dynamic)
        return [Found(name, target, outcome, whole) for target, outcome in found.items()]

    def whole(self, step: Step, dtype: torch.dtype, *, dynamic: bool = False) -> Fused:
        """What everything is fused to."""
        entry = replace(self.entry, partial="", partial_with_symbols="", unfused="")
        return entry.fused(step, dtype=dtype, dynamic=dynamic)


def _axis(spelling: Spelling) -> str:
    """The axis along which a spelling differs from the default."""
    default = Spelling()
    changed = [axis for axis, value in vars(spelling).items() if value != getattr(default, axis) and axis != "sizes"]
    return changed[0] if changed else "default"


def _by_axis() -> dict[str, list[Entry]]:
    axes: dict[str, list[Entry]] = {}
    for entry in COMPOSED:
        axes.setdefault(_axis(entry.spelling), []).append(entry)
    return axes | {"several": MIXED, "classics": CLASSICS}


AXES = _by_axis()

Cell = FamilyCell | ZooCell


def family_cells(kind: type[FamilyCell] = FamilyCell) -> list[FamilyCell]:
    return [kind(family, column) for family in FAMILIES for column in STEPS]


def zoo_cells(kind: type[ZooCell] = ZooCell) -> list[ZooCell]:
    return [kind(line, place) for line, entries in AXES.items() for place in range(len(entries))]
