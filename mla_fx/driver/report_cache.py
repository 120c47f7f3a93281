"""Reports of cached graphs, each in its own file next to PyTorch's caches."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import Counter
from pathlib import Path

from mla_fx.debug.memory import MemoryUse
from mla_fx.debug.report import Miss, PassRecord, Report
from mla_fx.graph.torch_compilers import cache_folder

FROM_CACHE = "taken from PyTorch's cache: this is the report of the first compilation, with its source lines"


def save(report: Report, *key: str) -> None:
    """Write the report of one graph. If the folder is not writable, later processes compile the graph anew."""
    path = _path(key)
    unfinished = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(as_text(report))
        unfinished.replace(path)


def load(*key: str) -> Report | None:
    """The report that was saved under this key; None if there is none or it cannot be read."""
    try:
        return from_text(_path(key).read_text())
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _path(key: tuple[str, ...]) -> Path:
    return cache_folder() / "mla_fx" / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"


def as_text(report: Report) -> str:
    """The report of one graph as JSON."""
    return json.dumps(report.to_dict())


def from_text(text: str) -> Report:
    """The saved report, with a note that says so. Raises ValueError, LookupError or TypeError for other text."""
    parts = json.loads(text)
    parts["misses"] = [Miss(**miss) for miss in parts["misses"]]
    parts["passes"] = [PassRecord(**{**record, "fired": Counter(record["fired"])}) for record in parts["passes"]]
    parts["memory"] = [MemoryUse(**memory) for memory in parts["memory"]]
    parts["notes"] = [FROM_CACHE, *parts["notes"]]
    del parts["layers"]  # follow from the others
    return Report(**parts)
