"""Stages and reports in torch's own logs: its structured trace, which `tlparse` shows, and TORCH_LOGS=mla_fx."""

from __future__ import annotations

import logging
import re

from torch.fx import Graph

from mla_fx.graph.torch_private import trace_artifact

from .graph_text import graph_text
from .report import PassRecord, Report

log = logging.getLogger("mla_fx")


class StageTrace:
    """Emits the graph after each pass that changed it and, with the first of these, the captured graph."""

    def __init__(self) -> None:
        self._count = 0
        self._code = ""
        self._held: list[tuple[str, str]] = []

    def stage(self, name: str, graph: Graph) -> None:
        title, text = f"mla_fx_{self._count:02d}_{re.sub(r'[^a-z0-9]+', '_', name.lower())}", graph_text(graph, name)
        code = text.partition("\n")[2]
        if not self._count:
            self._held = [(title, text)]
        elif code != self._code:
            for held in (*self._held, (title, text)):
                _emit(*held)
            self._held = []
        self._count, self._code = self._count + 1, code


def _emit(title: str, text: str) -> None:
    trace_artifact(title, "string", lambda: text)


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
