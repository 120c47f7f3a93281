"""Reports of graphs that Inductor takes from its cache without calling the pass that once rewrote them.

Inductor repeats what was counted while such a graph was compiled. So the pass counts the report that it saves, and what
is counted later without it is the report of a cached graph."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_fx.debug.report import Report
from mla_fx.graph.torch_compilers import inductor_counts, when_compiled

from . import report_cache

COUNTED = "mla_fx report "
LOST = "taken from PyTorch's cache, without a report: that of the first compilation is not in PyTorch's cache folder"


@dataclass
class CachedReports:
    """Passes the report of each cached graph to `use`; None if it was not saved."""

    use: Callable[[Report | None], None]
    _known: Counter[str] | None = None

    def watch(self) -> None:
        """From now on, Inductor may take a graph from its cache."""
        if self._known is None:
            self._known = _counted()
        when_compiled(self.read)

    def add(self, report: Report) -> None:
        """Save the report of a graph that is being compiled."""
        name = hashlib.sha256(report_cache.as_text(report).encode()).hexdigest()
        report_cache.save(report, name)
        for counts in (inductor_counts(), self._known):
            if counts is not None:
                counts[COUNTED + name] += 1

    def read(self, compiled: Any = None) -> None:
        """Use the reports of what came from the cache since `watch`."""
        found = Counter[str]() if self._known is None else _counted() - self._known
        self._known = None
        for name in found.elements():
            self.use(report_cache.load(name.removeprefix(COUNTED)))


def _counted() -> Counter[str]:
    return Counter({name: count for name, count in inductor_counts().items() if name.startswith(COUNTED)})
