"""The graph after each pass as text, in the report, in a folder, and in torch's trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch.fx import Graph

from mla_fx.errors import MlaWarning
from mla_fx.graph.torch_private import is_traced
from mla_fx.target import Shown

from .dump import Dump
from .recorded import RecordedStage, recorded
from .report import Report
from .torch_logs import StageTrace


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
