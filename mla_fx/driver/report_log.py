"""Reports of compilations: the last one, those of what is compiled meanwhile, and what these are expected to say."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from mla_fx.errors import FusionError
from mla_fx.options import expectation

if TYPE_CHECKING:
    from mla_fx.debug.report import Report

_listeners: ContextVar[tuple[list[Report], ...]] = ContextVar("listeners", default=())
_of_all_threads: dict[int, list[Report]] = {}  # by identity


class _Run:
    """The graphs that Dynamo compiled since the last report was read, or since a reset; a graph compiled without Dynamo
    is alone."""

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
        from mla_fx.graph.torch_compilers import was_reset

        with self._lock:
            if self._dynamo is not None and was_reset(self._dynamo):
                self._reports.clear()
            self._is_read = True
            return list(self._reports)


_run = _Run()


def remember(report: Report) -> None:
    """Publish a report as soon as its compilation begins."""
    _run.add(report)
    for reports in (*_listeners.get(), *list(_of_all_threads.values())):
        reports.append(report)


def last_report() -> Report | None:
    """Return the report of what this process compiled last, in all threads; None if that was nothing, or if
    `torch.compiler.reset()` was called since.

    It covers all graphs since the last report was read, at most 256: `generate`, graph breaks, several shapes or
    compiled regions make several. The report of several graphs is their sum, with that of each in `parts`. Reading it
    again returns the same until something more is compiled: its `made` and `code` say when and for which function."""
    reports = _run.reports()
    if len(reports) < 2:
        return reports[0] if reports else None
    from mla_fx.debug.report import Report

    return Report.merged(reports)


@contextlib.contextmanager
def listening() -> Iterator[list[Report]]:
    """Yield the reports of what this thread compiles from now on."""
    reports: list[Report] = []
    token = _listeners.set((*_listeners.get(), reports))
    try:
        yield reports
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def report() -> Iterator[Report]:
    """Report on everything that is compiled in this block, in all threads.

    `with mla_fx.report() as report: model(...)` makes one report of all graphs: parts of a graph break, several shapes,
    layers compiled one by one, and graphs that come from PyTorch's caches. It is empty until the block ends. What was
    compiled before and only runs is not in it."""
    from mla_fx.debug.report import Report

    whole, reports = Report(), list[Report]()
    _of_all_threads[id(reports)] = reports
    try:
        yield whole
    finally:
        del _of_all_threads[id(reports)]
        vars(whole).update(vars(Report.merged(reports)))


@contextlib.contextmanager
def expecting(**counts: int | tuple[int, ...]) -> Iterator[None]:
    """Raise FusionError at the end of the block if what it compiled, in this thread, did not fuse exactly these
    operators.

    `with expecting(mla_prolog=61, latent_attention=61): model(...)` counts over all graphs of the model, whether they
    come from graph breaks or from several models. Graphs that were compiled before and only run do not count."""
    wanted = expectation(counts)
    with listening() as reports:
        yield
    from mla_fx.debug.report import Report

    fused = Report.merged(reports).fused
    if not wanted.is_met(fused):
        listed = "\n".join(map(str, reports)) or "nothing was compiled"
        raise FusionError(f"expected {wanted}, fused {fused} in {len(reports)} graphs\n{listed}")
