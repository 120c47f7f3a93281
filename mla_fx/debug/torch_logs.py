"""Stages and reports in torch's own logs: its structured trace, which `tlparse` shows, and TORCH_LOGS=mla_fx."""

from __future__ import annotations

import logging

from mla_fx.graph.torch_private import trace_artifact
from mla_fx.target import Shown

from .recorded import RecordedStage
from .report import PassRecord, Report

log = logging.getLogger("mla_fx")


class StageTrace:
    """Emits the graph after each pass that changed it and, with the first of these, the captured graph."""

    def __init__(self) -> None:
        self._held: list[RecordedStage] = []
        self._is_changed = False

    def stage(self, stage: RecordedStage, shown: Shown) -> None:
        if not stage.is_new:
            return
        self._held.append(stage)
        if self._is_changed or len(self._held) > 1:
            for held in self._held:
                _emit(held)
            self._held, self._is_changed = [], True


def _emit(stage: RecordedStage) -> None:
    trace_artifact(f"mla_fx_{stage.title}", "string", lambda: stage.titled)


def tell(report: Report) -> None:
    """Write a report to torch's trace and to this log, if they are on."""
    trace_artifact("mla_fx_report", "json", report.to_dict)
    if log.isEnabledFor(logging.INFO):
        first, _, rest = str(report).partition("\n")
        log.info("%s", first)
        for record in report.passes:
            log.debug("  %s", _line(record))
        if rest:
            log.debug("%s", rest)


def _line(record: PassRecord) -> str:
    fired = "".join(f", {rule} x{count}" for rule, count in record.fired.items())
    nodes = f"{record.nodes_before} -> {record.nodes_after} nodes"
    return f"{record.name}: {record.milliseconds:.1f} ms, {nodes}{fired}"
