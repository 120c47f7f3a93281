"""What a compilation did: fused operators, nearest misses, and the passes between; as text, and as a table for
terminals and notebooks."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from mla_fx.debug import require

from .memory import MemoryUse
from .outcomes import Layers, Miss, Outcome, outcomes_of, rows_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Miss", "PassRecord", "Report"]

# What a report of several graphs has of each, one after the other.
SUMMED = "misses", "passes", "notes", "hindrances", "memory", "verified", "checked", "unchecked", "refuted"
HEADINGS = ("layers", "fused", "why not more")
# In each cell: notebooks have a rule of their own for cells, by which they align to the right.
CELL = 'style="text-align: left; padding: 0.3em 0.6em; border: 1px solid"'


Cells = Iterable[tuple[str, str, str]]


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
    that became operators, for targets that want them. `modules` has the path of the module that calls each fused
    operator, such as `model.layers.3.self_attn`. `notes` says what was read and what was not; `hindrances` are those
    notes that kept a graph with possible MLA from being read. `verified` has a line for each call that the option
    verify compared. `checked` counts what the option prove compared: rewrites, lowerings and weights laid out, one of
    each kind, and writes in place. `unchecked` says what it could not compare, `refuted` what would have changed a
    result and was not made. `code` is the captured function with the place of its first operation, `made` the local
    time, such as `2026-11-26 20:41:07`."""

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
    memory: list[MemoryUse] = field(default_factory=list)
    modules: dict[str, list[str]] = field(default_factory=dict)
    parts: list[Report] = field(default_factory=list)
    verified: list[str] = field(default_factory=list)
    checked: int = 0
    unchecked: list[str] = field(default_factory=list)
    refuted: list[str] = field(default_factory=list)
    code: str = ""
    made: str = ""

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
            for name in SUMMED:
                setattr(whole, name, getattr(whole, name) + getattr(report, name))
            whole.has_attention |= report.has_attention
            whole.is_training |= report.is_training
            whole.made = max(whole.made, report.made)
            prefix = f"graph {number}: " if len(reports) > 1 else ""
            whole.graphs.update({prefix + name: text for name, text in report.graphs.items()})
        codes = list(dict.fromkeys(report.code for report in reports if report.code))
        whole.code = f"{codes[0]} and {len(codes) - 1} more" if len(codes) > 1 else "".join(codes)
        return whole

    @property
    def layers(self) -> dict[str, list[Outcome]]:
        """Return what fused in each layer and its nearest miss, by the layer's path: one outcome, or several if graphs
        differ."""
        return outcomes_of(self)

    def standing_for(self, layers: Mapping[str, Sequence[str]]) -> Report:
        """The same for a model with only some layers traced: by the path of each, the paths of all that it
        represents."""
        if not layers:
            return self
        modules = {
            name: [equal for path in paths for equal in _equal(layers, path)] for name, paths in self.modules.items()
        }
        misses = [replace(miss, module=path) for miss in self.misses for path in _equal(layers, miss.module)]
        fused = {name: len(paths) for name, paths in modules.items()}
        parts = [part.standing_for(layers) for part in self.parts]
        most = max(fused.values(), default=0)
        memory = [one for part in parts for one in part.memory] or [
            replace(one, stands_for=most) for one in self.memory
        ]
        listed = ", ".join(f"{path} for {len(equal)}" for path, equal in layers.items())
        note = f"traced one of each group of equal layers: {listed}"
        notes = [note, *self.notes]
        return replace(self, fused=fused, modules=modules, misses=misses, notes=notes, memory=memory, parts=parts)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, under the names of its fields, and `layers`; without `graphs`, the texts of
        stages."""
        values = {part.name: _plain(getattr(self, part.name)) for part in fields(self) if part.name != "graphs"}
        layers = {path: [outcome.to_dict() for outcome in outcomes] for path, outcomes in self.layers.items()}
        return {**values, "layers": layers, "parts": [part.to_dict() for part in self.parts]}

    def table(self) -> Table:
        """The layers as a table of rich. Raises ModuleNotFoundError if rich is not installed."""
        return rich_table(self.headline, cells(self.layers, of_several=bool(self.parts)))

    __rich__ = table

    def _repr_html_(self) -> str:
        """The layers and the notes, for notebooks."""
        return html_table(self.headline, cells(self.layers, of_several=bool(self.parts)), self.remarks())

    def __repr__(self) -> str:
        graphs = f" in {len(self.parts)} graphs" if self.parts else ""
        return f"<Report on {self.target or 'no target'}: {self._outcome}{graphs}; {len(self.misses)} misses>"

    def __str__(self) -> str:
        lines = [f"{self.headline} in {self.milliseconds:.1f} ms" if self.target else self.headline]
        lines += [f"  compiled at {self.made}: {self.code}"] * bool(self.made and self.code)
        lines += [f"  {line}" for line in (*self._of_parts(), *self._of_layers(), *self.remarks())]
        if self.misses:
            lines.append("nearest misses:")
            lines += [f"  {line}" for line in _counted(self.misses)]
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        if not self.target:
            return "mla_fx: nothing was compiled"
        where = f" in {len(self.parts)} graphs" if self.parts else ""
        return f"mla_fx on {self.target}: {self._outcome}{where}"

    def remarks(self) -> list[str]:
        """Lines on memory, notes, and what was verified; what several graphs say alike is one line."""
        verified = (f"verify: {line}" for line in self.verified)
        proved = (f"prove: {line}" for line in (*self.refuted, *dict.fromkeys(self.unchecked)))
        return [*dict.fromkeys(map(str, self.memory)), *self._notes(), *verified, *proved]

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

    def _of_layers(self) -> Iterator[str]:
        """A line for each kind of layer with something fused; misses have their own lines."""
        for row in rows_of({path: outcomes for path, outcomes in self.layers.items() if path}):
            if any(outcome.fused for outcome in row.outcomes):
                told = (outcome.told(of_several=bool(self.parts)) for outcome in row.outcomes)
                yield f"{row.layers}: {'; '.join(told)}"

    def _notes(self) -> Iterator[str]:
        """The notes; those of several graphs once."""
        for note, count in Counter(self.notes).items():
            yield note if count == 1 else f"{note} ({count} times)"


def _plain(value: Any) -> Any:
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


def _equal(layers: Mapping[str, Sequence[str]], path: str) -> Iterator[str]:
    """The paths of all modules that the module at a path represents: one in each layer that its own represents."""
    layer = next((layer for layer in layers if f"{path}.".startswith(f"{layer}.")), None)
    yield from [path] if layer is None else (other + path[len(layer) :] for other in layers[layer])


def rich_table(title: str, rows: Cells) -> Table:
    """A table of rich. Raises ModuleNotFoundError if rich is not installed."""
    require("rich")
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEADINGS, box=SIMPLE_HEAD, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def html_table(title: str, rows: Cells, remarks: Iterable[str]) -> str:
    """A table of HTML, with the notes below it."""
    head = _html_row("th", HEADINGS)
    body = "".join(_html_row("td", row) for row in rows)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in remarks)
    listed = f"<ul>{notes}</ul>" if notes else ""
    caption = f'<caption style="text-align: left">{html.escape(title)}</caption>'
    return f'<table style="border-collapse: collapse">{caption}{head}{body}</table>{listed}'


def cells(layers: Layers, *, of_several: bool) -> Iterator[tuple[str, str, str]]:
    for row in rows_of(layers):
        for number, outcome in enumerate(row.outcomes):
            missed = str(outcome.missed) if outcome.missed else ""
            yield "" if number else row.layers, outcome.told(of_several=of_several), missed


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag} {CELL}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
