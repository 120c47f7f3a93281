"""What a compilation did: fused operators, nearest misses, and the passes between."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from .memory import Memory

_NUMBERED = re.compile(r"(?<=[A-Za-z_])\d+|(?<=\.)\d+(?=\.[A-Za-z_])")


@dataclass(frozen=True)
class Miss:
    """The deepest point at which a pattern failed at one place."""

    pattern: str
    reason: str
    node: str
    source: str
    module: str
    depth: int
    looks_like_mla: bool

    def __str__(self) -> str:
        return f"{self.pattern}: {self.sentence}"

    @property
    def sentence(self) -> str:
        """The reason and the place."""
        where = ", ".join(part for part in (self.node and f"at {self.node}", self.source, self.module) if part)
        return self.reason + (f" ({where})" if where else "")

    @property
    def kind(self) -> tuple[str, str, str]:
        """What equal layers have in common: pattern, line, and the reason without numbers of layers and nodes."""
        return self.pattern, _NUMBERED.sub("#", self.reason), self.source


@dataclass
class PassRecord:
    """One pass over the graph: its time, its sizes, and what fired."""

    name: str
    milliseconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    fired: Counter[str] = field(default_factory=Counter)


@dataclass(repr=False)
class Report:
    """What happened to a graph, or to several; then `parts` holds the report of each, and everything else is their sum.

    `fused` counts the operators of latent attention; `pieces` the norms and rotations that no larger operator took and
    that
    became operators, for targets that want them. `modules` has the path of the module that calls each fused operator,
    such
    as `model.layers.3.self_attn`. `notes` says what was read and what was not; `hindrances` are those notes that kept a
    graph with possible MLA from being read. `verified` has a line for each call that the option verify compared."""

    fused: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)
    misses: list[Miss] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    graphs: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    target: str = ""
    hindrances: list[str] = field(default_factory=list)
    has_attention: bool = False
    is_training: bool = False
    memory: list[Memory] = field(default_factory=list)
    modules: dict[str, list[str]] = field(default_factory=dict)
    parts: list[Report] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return sum(record.milliseconds for record in self.passes)

    @classmethod
    def merged(cls, reports: Sequence[Report]) -> Report:
        """One report for several graphs: those of graph breaks, several shapes or several regions."""
        whole = cls(target=", ".join(dict.fromkeys(report.target for report in reports)))
        if len(reports) > 1:
            whole.parts = [part for report in reports for part in report.parts or [report]]
        for number, report in enumerate(reports):
            for counts, more in ((whole.fused, report.fused), (whole.pieces, report.pieces)):
                counts.update({name: counts.get(name, 0) + count for name, count in more.items()})
            for name, paths in report.modules.items():
                whole.modules[name] = whole.modules.get(name, []) + paths
            whole.misses += report.misses
            whole.passes += report.passes
            whole.notes += report.notes
            whole.hindrances += report.hindrances
            whole.memory += report.memory
            whole.verified += report.verified
            whole.has_attention |= report.has_attention
            whole.is_training |= report.is_training
            prefix = f"graph {number}: " if len(reports) > 1 else ""
            whole.graphs.update({prefix + name: text for name, text in report.graphs.items()})
        return whole

    def standing_for(self, layers: Mapping[str, int]) -> Report:
        """The same for a model with only some layers traced: by path, how many layers each represents."""
        if not layers:
            return self
        counts = {name: sum(_first_of(layers, path) for path in paths) for name, paths in self.modules.items()}
        listed = ", ".join(f"{path} for {count}" for path, count in layers.items())
        note = f"traced one of each group of equal layers: {listed}"
        return replace(self, fused=counts, notes=[note, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, under the names of its fields; without `graphs`, the texts of stages."""
        values = {part.name: _plain(getattr(self, part.name)) for part in fields(self) if part.name != "graphs"}
        return {**values, "parts": [part.to_dict() for part in self.parts]}

    def __repr__(self) -> str:
        graphs = f" in {len(self.parts)} graphs" if self.parts else ""
        return f"<Report on {self.target or 'no target'}: {self._outcome}{graphs}; {len(self.misses)} misses>"

    def __str__(self) -> str:
        where = f"{',' * bool(self.pieces)}{f' in {len(self.parts)} graphs' if self.parts else ''}"
        lines = [f"mla_fx on {self.target}: {self._outcome}{where} in {self.milliseconds:.1f} ms"]
        lines += [f"  {line}" for line in self._of_parts()]
        lines += [f"  {note}" for note in (*dict.fromkeys(map(str, self.memory)), *self._notes())]
        lines += [f"  verify: {line}" for line in self.verified]
        if self.misses:
            lines.append("nearest misses:")
            lines += [f"  {line}" for line in _counted(self.misses)]
        return "\n".join(lines)

    @property
    def _outcome(self) -> str:
        fused, pieces = (
            ", ".join(f"{name} x{count}" for name, count in counts.items()) for counts in (self.fused, self.pieces)
        )
        return f"fused {fused or 'nothing'}" + (f", and also {pieces}" if pieces else "")

    def _of_parts(self) -> Iterator[str]:
        """A line for each outcome, with the numbers of its graphs."""
        alike: dict[str, list[int]] = {}
        for number, part in enumerate(self.parts):
            without = "" if part.fused or part.has_attention else ", no attention"
            alike.setdefault(part._outcome + without, []).append(number)
        for outcome, numbers in alike.items():
            yield f"graph{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {outcome}"

    def _notes(self) -> Iterator[str]:
        """The notes; those of several graphs once."""
        for note, count in Counter(self.notes).items():
            yield note if count == 1 else f"{note} ({count} times)"


def _plain(value: Any) -> Any:
    """A part of a report as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _counted(misses: Sequence[Miss]) -> Iterator[str]:
    """A line for each kind of miss: the first, how often, and the last module. Patterns that failed alike at the same
    places share a line."""
    alike: dict[tuple[str, str, str], list[Miss]] = {}
    for miss in misses:
        alike.setdefault(miss.kind, []).append(miss)
    together: dict[tuple[str, ...], list[list[Miss]]] = {}
    for found in alike.values():
        together.setdefault(tuple(miss.sentence for miss in found), []).append(found)
    for same in together.values():
        (first, *more), patterns = same[0], ", ".join(found[0].pattern for found in same)
        last = more[-1].module if more else ""
        times = f"; {len(more) + 1} times" if more else ""
        where = f", the last in {last}" if last not in ("", first.module) else ""
        yield f"{patterns}: {first.sentence}{times}{where}"


def _first_of(layers: Mapping[str, int], path: str) -> int:
    """How many modules the module at a path represents: as many as its layer does, or one."""
    return next((count for layer, count in layers.items() if f"{path}.".startswith(f"{layer}.")), 1)
