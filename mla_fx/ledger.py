"""Who hears of a compilation: whoever asks for the last report, and whoever counts what is compiled meanwhile."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .debug.report import Report

_listeners: ContextVar[tuple[list[Report], ...]] = ContextVar("listeners", default=())


class _Run:
    """The graphs that were compiled since the last report was asked for, or since Dynamo was reset."""

    def __init__(self, most: int = 256) -> None:
        self._lock = threading.Lock()
        self._reports: deque[Report] = deque(maxlen=most)
        self._is_told = False
        self._frames = 0
        self._frame: Callable[[], Any] = lambda: None

    def add(self, report: Report) -> None:
        from .torch_private import compiling

        frame, frames = compiling()
        with self._lock:
            is_same = frame is not None and frame is self._frame()
            was_reset = not is_same and frames <= self._frames
            if self._is_told or was_reset:
                self._reports.clear()
            self._is_told, self._frames = False, frames
            self._frame = (lambda: None) if frame is None else weakref.ref(frame)
            self._reports.append(report)

    def reports(self) -> list[Report]:
        with self._lock:
            self._is_told = True
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
    from .debug.report import Report

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
