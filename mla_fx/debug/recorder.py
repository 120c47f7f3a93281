"""The graph after each pass as text, in the report, in a folder, and in torch's own logs: its structured trace, which
`tlparse` shows, and TORCH_LOGS=mla_fx, which has reports, too."""

import logging
import warnings
from collections.abc import Callable

from torch.fx import Graph

from mla_fx.errors import MlaWarning
from mla_fx.graph.torch_private import is_traced, trace_artifact
from mla_fx.target import Shown

from .dump import Dump
from .graph_text import RecordedStage, recorded
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


class Recorder:
    """Writes each stage of a graph once for all readers. Without readers it does nothing.

    A failure is reported once and then ignored: no compilation depends on it."""

    def __init__(self, report: Report, folder: str | None, *, keep_text: bool, fuses_loops: bool = False) -> None:
        self._report = report
        self._readers: list[Callable[[RecordedStage, Shown], None]] = []
        self._dump: Dump | None = None
        self._last: RecordedStage | None = None
        self._count = 0
        self._fenced(lambda: self._open(folder, keep_text, fuses_loops))

    def stage(self, name: str, graph: Graph) -> None:
        if self._readers:
            self._fenced(lambda: self._write(name, graph))

    def finish(self) -> None:
        self._fenced(self._close)

    def compiled(self, name: str, show: Callable[[], Shown | None]) -> None:
        """Add what a compiler made of the graph, if that can be shown, to a dump and to a report that keeps texts."""
        if self._dump is not None or self._keep in self._readers:
            self._fenced(lambda: self._add(name, show()))

    def _open(self, folder: str | None, keep_text: bool, fuses_loops: bool) -> None:
        if folder:
            self._dump = Dump(folder, fuses_loops=fuses_loops)
            self._readers.append(self._dump.stage)
        if keep_text:
            self._readers.append(self._keep)
        if is_traced():
            self._readers.append(StageTrace().stage)

    def _write(self, name: str, shown: Shown) -> None:
        self._last = recorded(self._count, name, shown, self._last)
        self._count += 1
        for read in self._readers:
            read(self._last, shown)

    def _keep(self, stage: RecordedStage, shown: Shown) -> None:
        self._report.graphs[stage.name] = stage.text

    def _add(self, name: str, shown: Shown | None) -> None:
        if shown is not None:
            self._write(name, shown)
            self._close()

    def _close(self) -> None:
        if self._dump is not None:
            self._dump.finish(self._report)

    def _fenced(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._dump, self._readers = None, []
            self._report.notes.append(f"the dump is incomplete: {error}")
            warnings.warn(f"mla_fx: the dump is incomplete: {error}", MlaWarning, stacklevel=2)
