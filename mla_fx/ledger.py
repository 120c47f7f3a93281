"""Who hears of a compilation: whoever asks for the last report, and whoever counts what is compiled meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .debug.report import Report

_last: list[Report] = []
_listeners: ContextVar[tuple[list[Report], ...]] = ContextVar("listeners", default=())


def remember(report: Report) -> None:
    """Makes a report known as soon as its compilation begins."""
    _last[:] = [report]
    for reports in _listeners.get():
        reports.append(report)


def last_report() -> Report | None:
    """The report of the last compilation in this process, or None before the first."""
    return _last[-1] if _last else None


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
