"""Who hears of a compilation: whoever asks for the last report, and whoever counts what is compiled meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_fx.debug.report import Report

_listeners: ContextVar[tuple[list[Report], ...]] = ContextVar("listeners", default=())


class _Run:
    """The graphs that Dynamo compiled since the last report was asked for, or since it was reset; one that was compiled
    without Dynamo is alone."""

    def __init__(self, most: int = 256) -> None:
        self._lock = threading.Lock()
        self._reports: deque[Report] = deque(maxlen=most)
        self._is_read = False
        self._dynamo: object | None = None

    def add(self, report: Report) -> None:
        from mla_fx.graph.torch_compilers import dynamo_run

        dynamo = dynamo_run()
        with self._lock:
            if self._is_read or dynamo is None or dynamo is not self._dynamo:
                self._reports.clear()
            self._is_read, self._dynamo = False, dynamo
            self._reports.append(report)

    def reports(self) -> list[Report]:
        with self._lock:
            self._is_read = True
            return list(self._reports)


_run = _Run()


def remember(report: Report) -> None:
    """Makes a report known as soon as its compilation begins."""
    _run.add(report)
    for reports in _listeners.get():
        reports.append(report)


def last_report() -> Report | None:
    """What was compiled last in this process, in all of its threads; None before the first compilation.

    That is one graph or several, as `generate`, graph breaks, several shapes or compiled regions make them: all since
    the last report was asked for, or since `torch.compiler.reset()`, and at most the last 256. The report of several is
    their sum, with that of each in `parts`. Asked for again, it is the same until something more is compiled."""
    reports = _run.reports()
    if len(reports) < 2:
        return reports[0] if reports else None
    from mla_fx.debug.report import Report

    return Report.merged(reports)


@contextlib.contextmanager
def listening() -> Iterator[list[Report]]:
    """The reports of what this thread compiles from now on."""
    reports: list[Report] = []
    token = _listeners.set((*_listeners.get(), reports))
    try:
        yield reports
    finally:
        _listeners.reset(token)


def is_anyone_listening() -> bool:
    return bool(_listeners.get())
