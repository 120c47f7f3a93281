"""What outlives a process in PyTorch's caches: the key of a compiled graph, and reports, each in its own file.

Inductor takes a graph from its cache without calling the pass that once rewrote it, but repeats what was counted while
the graph was compiled. So the pass counts the report that it saves, and what is counted later without it is the report
of a cached graph."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_fx.debug.memory import MemoryUse
from mla_fx.debug.report import Miss, PassRecord, Report
from mla_fx.graph.torch_compilers import cache_folder, inductor_counts, when_compiled
from mla_fx.graph.torch_private import is_traceable_wrapper_subclass, memory_of
from mla_fx.options import Options

from . import discovery

FROM_CACHE = "taken from PyTorch's cache: this is the report of the first compilation, with its source lines"
COUNTED = "mla_fx report "
LOST = "taken from PyTorch's cache, without a report: that of the first compilation is not in PyTorch's cache folder"


def key(options: Options, inputs: Sequence[Any] = ()) -> str:
    """A key that changes with the options, the sources of all rules, operators and lowerings, and which of a graph's
    inputs share memory, which PyTorch's own key does not contain.

    A target's own options are not part of it: the compiler has them in the key of its own cache."""
    decides = source_hash(), dataclasses.replace(options, extra={}), _memories(inputs)
    return hashlib.sha256(repr(decides).encode()).hexdigest()


def _memories(inputs: Sequence[Any]) -> list[int]:
    """For each tensor input, the number of the first input that shares its memory."""
    first: dict[int, int] = {}
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return [first.setdefault(memory_of(value), place) for place, value in enumerate(tensors)]


def are_plain(inputs: Sequence[Any]) -> bool:
    """Whether it is known for all tensors which memory they use."""
    tensors = (value for value in inputs if isinstance(value, Tensor))
    return all(value.layout is torch.strided and not is_traceable_wrapper_subclass(value) for value in tensors)


def source_hash() -> str:
    """A hash of the sources that decide how a graph is rewritten; not of their imports from elsewhere."""
    return _hash_of(discovery.found_rules())


@functools.lru_cache(maxsize=1)
def _hash_of(rules: discovery.Found) -> str:
    """The hash while these are the rules; a rule that cannot be used does not count, whatever its source is."""
    digest = hashlib.sha256(repr([str(fault) for fault in rules.faults]).encode())
    for package in ("mla_fx", discovery.LOWERING, *discovery.packages()):
        for name, path in discovery.sources(package):
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


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
        name = hashlib.sha256(as_text(report).encode()).hexdigest()
        save(report, name)
        for counts in (inductor_counts(), self._known):
            if counts is not None:
                counts[COUNTED + name] += 1

    def read(self, compiled: Any = None) -> None:
        """Use the reports of what came from the cache since `watch`."""
        found = Counter[str]() if self._known is None else _counted() - self._known
        self._known = None
        for name in found.elements():
            self.use(load(name.removeprefix(COUNTED)))


def _counted() -> Counter[str]:
    return Counter({name: count for name, count in inductor_counts().items() if name.startswith(COUNTED)})
