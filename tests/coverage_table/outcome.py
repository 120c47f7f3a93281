"""What fuses in one call, on several targets: each takes the graph up to its own compiler, which is left out."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

import mla_fx
from mla_fx.driver.report_log import listening

TARGETS = ("reference", "inductor")
WHOLE, BUT_QUERY, ATTENTION, UNFUSED = "whole", "all but the query", "attention only", "unfused"
DENSE = "latent_attention", "mla_attention"
SPARSE = "sparse_latent_attention", "sparse_mla_attention"
BESIDE = {"sparse": SPARSE, "indexer": ("lightning_index",)}
NOT_IN_PLACE = "does not write its caches in place"
NOT_LOWERED = (" becomes its body: ", " stays a call: ")
# Otherwise Dynamo traces twice, to the same graph, and caching fake tensors with symbols costs more than it saves.
QUICK = {"specialize_float": True, "fake_tensor_cache_enabled": False}


@dataclass(frozen=True)
class Outcome:
    """`fused` counts operators, `unfused` the attentions that did not fuse. `reasons` are the nearest misses, without
    those of queries that are not absorbed, which the page explains once. `copies` say why a cache is not written in
    place although the target would, and `bodies` why a target with its own operators has none for a fused one."""

    fused: dict[str, int]
    unfused: int
    reasons: tuple[str, ...]
    copies: tuple[str, ...]
    bodies: tuple[str, ...]

    @property
    def writes_caches(self) -> bool:
        return any(name in self.fused for name in ("mla_prolog", "kv_rmsnorm_rope_cache"))

    def __str__(self) -> str:
        """How much of each attention was fused, and what of a choice of keys."""
        whole, keys = (self.fused.get(name, 0) for name in ("mla_prolog", "kv_rmsnorm_rope_cache"))
        attentions = sum(self.fused.get(name, 0) for name in (*DENSE, *SPARSE))
        rest = attentions - whole - keys
        counts = {WHOLE: whole, BUT_QUERY: keys, ATTENTION: rest, UNFUSED: self.unfused}
        parts = (words if count == 1 else f"{count} {words}" for words, count in counts.items() if count)
        beside = (f" + {word}" for word, names in BESIDE.items() if any(self.fused.get(name) for name in names))
        return (", ".join(parts) or UNFUSED) + "".join(beside)


def outcomes(
    module: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    dynamic: bool,
    targets: Sequence[str] = TARGETS,
    **options: Any,
) -> dict[str, Outcome]:
    """What each target makes of one call, including graph breaks."""
    probe = _Probe(targets, options)
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings(), torch._dynamo.config.patch(QUICK if dynamic else {}):
        warnings.simplefilter("ignore")
        torch.compile(module, backend=probe, dynamic=dynamic)(*args, **kwargs)
    return {target: probe.outcome(target) for target in targets}


class _Probe:
    """A backend that lets every target rewrite a copy of the same graph, and then runs the original."""

    def __init__(self, targets: Sequence[str], options: dict[str, Any]) -> None:
        self.reports: dict[str, list[mla_fx.Report]] = {target: [] for target in targets}
        self.options = options

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for target, reports in self.reports.items():
            with _no_compiler(target), listening() as told:
                mla_fx.mla_backend(copy.deepcopy(gm), example_inputs, options={"target": target, **self.options})
            reports += told
        return gm.forward

    def outcome(self, target: str) -> Outcome:
        report = mla_fx.Report.merged(self.reports[target])
        misses = (f"{miss.pattern}: {miss.reason}" for miss in report.misses if miss.pattern != "absorb")
        reasons = dict.fromkeys([*misses, *report.hindrances])
        copies = dict.fromkeys(note for note in report.notes if NOT_IN_PLACE in note)
        bodies = dict.fromkeys(note for note in report.notes if any(part in note for part in NOT_LOWERED))
        unfused = sum(miss.pattern == "mla_attention" and miss.looks_like_mla for miss in report.misses)
        return Outcome(report.fused, unfused, tuple(reasons), tuple(copies), tuple(bodies))


@contextlib.contextmanager
def _no_compiler(target: str) -> Iterator[None]:
    """A target's own compiler is left out: its input is the result."""
    if target in ("ge", "aclgraph"):
        importlib.import_module("torch_npu")  # which makes torchair importable
        no_check = mock.patch("mla_fx.lowering.ascend.toolchain._check_written_in_place")
        with mock.patch("torchair.get_compiler", lambda config: _checked), no_check:
            yield
        return
    with mock.patch("mla_fx.lowering.inductor.compile_fx_inner", _as_it_is):
        yield


def _checked(gm: GraphModule, *_: Any, **__: Any) -> mock.Mock:
    """The vendor's operators are those that CANN takes."""
    from npu import fx_calls  # which imports torch_npu

    fx_calls.check(gm)
    return _as_it_is(gm)


def _as_it_is(gm: GraphModule, *_: Any, **__: Any) -> mock.Mock:
    return mock.Mock(side_effect=gm.forward)
