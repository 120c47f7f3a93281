"""What fuses in one call, on several targets: each takes the graph up to its own compiler, which is left out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

import mla_fx

TARGETS = ("reference", "inductor")
WHOLE, BUT_QUERY, ATTENTION, UNFUSED = "whole", "all but the query", "attention only", "unfused"
NOT_IN_PLACE = "does not write its caches in place"
FLOATS_ARE_NUMBERS = {"specialize_float": True}  # else dynamic sizes have Dynamo trace twice, to the same graph


@dataclass(frozen=True)
class Outcome:
    """`fused` counts operators, `unfused` the attentions that stayed as they came. `reasons` are the nearest misses,
    and `copies` why a cache is not written in place where the target would do so."""

    fused: dict[str, int]
    unfused: int
    reasons: tuple[str, ...]
    copies: tuple[str, ...]

    @property
    def writes_caches(self) -> bool:
        return any(name in self.fused for name in ("mla_prolog", "kv_rmsnorm_rope_cache"))

    def __str__(self) -> str:
        """How much of each attention was fused."""
        whole, keys = (self.fused.get(name, 0) for name in ("mla_prolog", "kv_rmsnorm_rope_cache"))
        attentions = sum(self.fused.get(name, 0) for name in ("latent_attention", "mla_attention"))
        rest = attentions - whole - keys
        counts = {WHOLE: whole, BUT_QUERY: keys, ATTENTION: rest, UNFUSED: self.unfused}
        parts = (words if count == 1 else f"{count} {words}" for words, count in counts.items() if count)
        return ", ".join(parts) or UNFUSED


def outcomes(
    module: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, dynamic: bool
) -> dict[str, Outcome]:
    """What each target makes of one call, graph breaks included."""
    probe = _Probe()
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings(), torch._dynamo.config.patch(FLOATS_ARE_NUMBERS):
        warnings.simplefilter("ignore")
        torch.compile(module, backend=probe, dynamic=dynamic)(*args, **kwargs)
    return {target: probe.outcome(target) for target in TARGETS}


class _Probe:
    """A backend that has every target rewrite a copy of the same graph, and then runs what the last one was given."""

    def __init__(self) -> None:
        self.reports: dict[str, list[mla_fx.Report]] = {target: [] for target in TARGETS}

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for target in TARGETS:
            with mock.patch("mla_fx.lowering.inductor.compile_fx_inner", _as_it_is):
                run = mla_fx.mla_backend(copy.deepcopy(gm), example_inputs, options={"target": target})
            self.reports[target].append(mla_fx.last_report())
        return run

    def outcome(self, target: str) -> Outcome:
        report = mla_fx.Report.merged(self.reports[target])
        reasons = dict.fromkeys([*(f"{miss.pattern}: {miss.reason}" for miss in report.misses), *report.hindrances])
        copies = dict.fromkeys(note for note in report.notes if NOT_IN_PLACE in note)
        unfused = sum(miss.pattern == "mla_attention" and miss.looks_like_mla for miss in report.misses)
        return Outcome(report.fused, unfused, tuple(reasons), tuple(copies))


def _as_it_is(gm: GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
    """In the place of Inductor's compiler."""
    return gm.forward
