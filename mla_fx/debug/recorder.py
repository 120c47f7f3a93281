"""The graph after each pass as text, in the report, in a folder, and in torch's trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch.fx import Graph

from mla_fx.errors import MlaWarning
from mla_fx.graph.torch_private import is_traced

from .dump import Dump
from .graph_text import graph_text
from .report import Report
from .torch_logs import StageTrace


class Recorder:
    """Writes the stages of one graph. A failure is reported once and then ignored: no compilation depends on it."""

    def __init__(self, report: Report, folder: str | None, *, keep_text: bool) -> None:
        self._report = report
        self._keep_text = keep_text
        self._trace = StageTrace() if is_traced() else None
        self._dump: Dump | None = None
        self._fenced(lambda: self._open(folder))

    def stage(self, name: str, graph: Graph) -> None:
        self._fenced(lambda: self._write(name, graph))

    def finish(self) -> None:
        self._fenced(self._close)

    def _open(self, folder: str | None) -> None:
        self._dump = Dump(folder) if folder else None

    def _write(self, name: str, graph: Graph) -> None:
        if self._keep_text:
            self._report.graphs[name] = graph_text(graph)
        if self._dump is not None:
            self._dump.stage(name, graph)
        if self._trace is not None:
            self._trace.stage(name, graph)

    def _close(self) -> None:
        if self._dump is not None:
            self._dump.finish(self._report)

    def _fenced(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._dump, self._trace, self._keep_text = None, None, False
            self._report.notes.append(f"the dump is incomplete: {error}")
            warnings.warn(f"mla_fx: the dump is incomplete: {error}", MlaWarning, stacklevel=2)
