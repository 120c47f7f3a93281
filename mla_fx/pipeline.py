"""The passes, in order, on one screen; after each, one hook checks, times and records the graph."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph

from . import ops as _ops  # noqa: F401  registers torch.ops.mla_fx
from .absorb import absorb
from .canonical.softmax import anchors
from .debug.report import PassRecord, Report, count_fused
from .options import Options
from .recognise import recognise
from .rewrite import Emitter
from .rule import Rule
from .surgery import Snapshot, erase_orphans, sort_nodes


@dataclass
class Run:
    """One graph on its way through the pipeline."""

    graph: Graph
    options: Options
    rules: tuple[Rule[Any], ...]
    report: Report
    record: PassRecord = field(default_factory=lambda: PassRecord("start"))
    original: Snapshot | None = None
    on_stage: Callable[[str, Graph], None] | None = None
    _emit: Emitter | None = None

    @property
    def emit(self) -> Emitter:
        """What adds nodes. The untouched graph is kept from the moment the first one is added."""
        if self._emit is None:
            self.original = Snapshot(self.graph)
            self._emit = Emitter(self.graph)
        return self._emit

    def keep_original(self) -> None:
        """Has the untouched graph kept without adding a node."""
        _ = self.emit

    @property
    def is_changed(self) -> bool:
        return self._emit is not None


@dataclass(frozen=True)
class Pass:
    name: str
    apply: Callable[[Run], None]


def choose_absorbed(run: Run) -> None:
    if run.is_changed:
        absorb(run.graph, run.emit, run.options.absorb)


def tidy(run: Run) -> None:
    """Removes what the fusions left unused and puts every node behind its operands again."""
    if run.original is None:
        return
    sort_nodes(run.graph)
    erase_orphans(run.graph, run.original)
    run.graph.lint()


PIPELINE = (
    Pass("recognise attention", recognise("attention")),
    Pass("choose absorbed or expanded", choose_absorbed),
    Pass("recognise prolog", recognise("prolog")),
    Pass("recognise cache", recognise("cache")),
    Pass("tidy", tidy),
)


def run_pipeline(run: Run, passes: tuple[Pass, ...] = PIPELINE) -> None:
    """Takes a graph through the passes. A graph without a softmax is not looked at."""
    _show(run, "captured")
    if next(anchors(run.graph), None) is None:
        return
    with _collector_paused():
        _run_passes(run, passes)
    for name, count in count_fused(run.graph).items():
        run.report.fused[name] = run.report.fused.get(name, 0) + count


def _run_passes(run: Run, passes: tuple[Pass, ...]) -> None:
    for step in passes:
        run.record = PassRecord(step.name, nodes_before=len(run.graph.nodes))
        start = time.perf_counter()
        step.apply(run)
        run.record.milliseconds = (time.perf_counter() - start) * 1e3
        run.record.nodes_after = len(run.graph.nodes)
        run.report.passes.append(run.record)
        _show(run, step.name)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Rewriting makes many small objects and no garbage, and one full collection walks all of torch: half a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _show(run: Run, name: str) -> None:
    if run.on_stage is not None:
        run.on_stage(name, run.graph)
