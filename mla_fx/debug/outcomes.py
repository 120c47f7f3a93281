"""A report by layers: what fused in each layer, and why not more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from mla_fx.graph.node_text import consecutive

_NUMBERED = re.compile(r"(?<=[A-Za-z_])\d+|(?<=\.)\d+(?=\.[A-Za-z_])")
_LAYER = re.compile(r".*\.\d+(?=\.[A-Za-z_])|\d+(?=\.[A-Za-z_])")
WHOLE = "the model itself"  # what is in no module, or in a model without layers
_RANGE = 3  # consecutive numbers from which on a range is shorter


@dataclass(frozen=True)
class Miss:
    """The deepest point at which a pattern failed at one place.

    `by_design` says that nothing in the program is to blame, so that more cannot fuse for this target."""

    pattern: str
    reason: str
    node: str
    source: str
    module: str
    depth: int
    looks_like_mla: bool = False
    by_design: bool = False

    def __str__(self) -> str:
        return f"{self.pattern}: {self.sentence}"

    @property
    def sentence(self) -> str:
        where = ", ".join(part for part in (self.node and f"at {self.node}", self.source, self.module) if part)
        return self.reason + (f" ({where})" if where else "")

    @property
    def kind(self) -> tuple[str, str, str]:
        """What equal layers have in common: pattern, line, and the reason without numbers of layers and nodes."""
        return self.pattern, _NUMBERED.sub("#", self.reason), self.source


@dataclass(frozen=True)
class Outcome:
    """What happened to a layer: its fused operators in each of these graphs, and its nearest miss, if there is one."""

    fused: tuple[tuple[str, int], ...]
    missed: Miss | None = None
    graphs: tuple[int, ...] = (0,)

    def told(self, *, of_several: bool) -> str:
        """The operators, and where there are several graphs, their numbers."""
        operators = ", ".join(name if count == 1 else f"{name} x{count}" for name, count in self.fused) or "nothing"
        several = "s" if len(self.graphs) > 1 else ""
        return f"{operators} in graph{several} {', '.join(map(str, self.graphs))}" if of_several else operators

    @property
    def kind(self) -> tuple[Any, ...]:
        """What it has in common with the outcomes of equal layers."""
        return self.fused, self.missed and self.missed.kind, self.graphs

    def to_dict(self) -> dict[str, Any]:
        missed = self.missed and {"pattern": self.missed.pattern, "reason": self.missed.sentence}
        return {"graphs": list(self.graphs), "fused": dict(self.fused), "missed": missed}


Layers = Mapping[str, Sequence[Outcome]]


@dataclass(frozen=True)
class Row:
    """Layers that differ in their numbers alone."""

    layers: str
    outcomes: Sequence[Outcome]


class Fused(Protocol):
    """What fused in a graph, in which modules, and what did not; in several graphs, if it has parts."""

    @property
    def modules(self) -> Mapping[str, Sequence[str]]: ...

    @property
    def misses(self) -> Sequence[Miss]: ...

    @property
    def parts(self) -> Sequence[Fused]: ...


def outcomes_of(report: Fused) -> dict[str, list[Outcome]]:
    """Return the outcomes of each layer by its path. Graphs in which a layer has the same outcome share it."""
    found: dict[str, list[Outcome]] = {}
    for number, graph in enumerate(report.parts or [report]):
        for path, outcome in _in_graph(graph, number):
            outcomes = found.setdefault(path, [])
            same = next((place for place, other in enumerate(outcomes) if _are_alike(other, outcome)), None)
            if same is None:
                outcomes.append(outcome)
            else:
                outcomes[same] = replace(outcomes[same], graphs=(*outcomes[same].graphs, number))
    return dict(sorted(found.items(), key=lambda layer: _by_number(layer[0])))


def rows_of(layers: Layers) -> list[Row]:
    alike: dict[tuple[Any, ...], list[str]] = {}
    for path, outcomes in layers.items():
        kind = _list_of(path), *(outcome.kind for outcome in outcomes)
        alike.setdefault(kind, []).append(path)
    return [Row(_named_together(paths), layers[paths[0]]) for paths in alike.values()]


def layer_of(path: str) -> str:
    """The layer that a module is in: the part of its path up to the last number that a name follows."""
    found = _LAYER.match(path)
    return found[0] if found else path


def _in_graph(report: Fused, number: int) -> Iterator[tuple[str, Outcome]]:
    fused: dict[str, Counter[str]] = {}
    misses: dict[str, list[Miss]] = {}
    for name, paths in report.modules.items():
        for path in paths:
            fused.setdefault(layer_of(path), Counter())[name] += 1
    for miss in report.misses:
        misses.setdefault(layer_of(miss.module), []).append(miss)
    for path in dict.fromkeys(chain(fused, misses)):
        nearest = max(misses.get(path, ()), key=_nearness, default=None)
        yield path, Outcome(tuple(fused.get(path, Counter()).items()), nearest, (number,))


def _nearness(miss: Miss) -> tuple[bool, bool, int]:
    """What can be mended comes before what is by design."""
    return miss.looks_like_mla, not miss.by_design, miss.depth


def _are_alike(one: Outcome, other: Outcome) -> bool:
    return replace(one, graphs=()).kind == replace(other, graphs=()).kind


def _list_of(path: str) -> str:
    """The list that a layer is in; the path itself if it is in none."""
    before, _, last = path.rpartition(".")
    return before if last.isdecimal() else path


def _named_together(paths: Sequence[str]) -> str:
    """`model.layers.0 … 60 (61)` for layers of one list, in order."""
    if len(paths) == 1:
        return paths[0] or WHOLE
    before = paths[0].rpartition(".")[0]
    numbers = [int(path.rpartition(".")[2]) for path in paths]
    return f"{before}.{', '.join(_ranges(numbers))} ({len(paths)})".lstrip(".")


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    for run in consecutive(numbers):
        yield f"{run[0]} … {run[-1]}" if len(run) >= _RANGE else ", ".join(map(str, run))


def _by_number(path: str) -> list[Any]:
    """A key that sorts layer 10 after layer 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]
