"""The tables as Markdown, and their lines. Cells are short: what several variants share is said once, and reasons are
numbered footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lib.families import COUNTS_FLAGS

from .outcome import TARGETS
from .rows import STEPS, Cell, Found, family_cells, zoo_cells

FAMILIES_STEPS = tuple(name for step in STEPS for name in (step, "dynamic"))
FAMILIES_HEAD = ("family", *FAMILIES_STEPS, "in place", "notes")
ZOO_HEAD = ("what is varied", "spellings", "whole", "less", "in place")
EAGER = "transformers has no `sdpa` for it."
FLAG = "With `torch._dynamo.config.capture_dynamic_output_shape_ops = True`; otherwise a graph break splits the layer."

Results = Mapping[str, Sequence[Found]]
Line = Callable[[str, Results, "Notes"], str]


class Notes(dict[str, int]):
    """Sentences, each with its number."""

    def numbers(self, sentences: Iterable[str]) -> str:
        numbers = {self.setdefault(sentence, len(self) + 1) for sentence in sentences}
        return ", ".join(map(str, sorted(numbers)))

    def lines(self) -> Iterator[str]:
        return (f"{number}. {sentence}" for sentence, number in self.items())


@dataclass(frozen=True)
class Table:
    """A table: its head, its cells, and how a line is made. A line adds its notes to those of the other tables."""

    head: Sequence[str]
    cells: Sequence[Cell]
    line: Line

    @property
    def names(self) -> list[str]:
        """Names the lines, in order."""
        return list(dict.fromkeys(cell.line for cell in self.cells))

    def rendered(self, lines: Mapping[str, Results], notes: Notes) -> Iterator[str]:
        yield from (row(self.head), rule(self.head))
        yield from (self.line(name, lines[name], notes) for name in self.names if name in lines)
        yield ""


@dataclass(frozen=True)
class Tables:
    """Tables that share their notes, and their mark on the page."""

    mark: str
    tables: Sequence[Table]

    @property
    def names(self) -> list[str]:
        return [name for table in self.tables for name in table.names]

    def of_line(self, name: str) -> list[Cell]:
        return [cell for table in self.tables for cell in table.cells if name in ("", cell.line)]

    def line(self, name: str, found: Results, notes: Notes) -> str:
        (table,) = (table for table in self.tables if name in table.names)
        return table.line(name, found, notes)

    def rendered(self, lines: Mapping[str, Results]) -> str:
        notes = Notes()
        text = [line for table in self.tables for line in table.rendered(lines, notes)]
        return "\n".join([*text, *notes.lines()]) + "\n"


def _family_line(family: str, steps: Results, notes: Notes) -> str:
    every = [one for found in steps.values() for one in found]
    said = [EAGER] if all(one.variant != "sdpa" for one in every) else []
    said += [FLAG] if family in COUNTS_FLAGS else []
    columns = (alike(part) for found in steps.values() for part in fixed_and_dynamic(found))
    return row((family, *columns, in_place(steps, notes), notes.numbers([*said, *reasons(every)])))


def _zoo_line(axis: str, spellings: Results, notes: Notes) -> str:
    """Spellings that fuse less in some variants only are named."""
    lacking = {name: less for name, found in spellings.items() if (less := [one for one in found if not one.is_whole])}
    parts = []
    for name, less in lacking.items():
        what = alike(less) if len(less) == len(spellings[name]) else _apart(less)
        parts.append(f"{short(name)}: {what} ({notes.numbers(reasons(less))})")
    return row((axis, len(spellings), len(spellings) - len(lacking), "; ".join(parts), in_place(spellings, notes)))


def fixed_and_dynamic(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    return [one for one in found if not one.is_dynamic], [one for one in found if one.is_dynamic]


def reasons(found: Iterable[Found]) -> list[str]:
    return [reason for one in found for reason in one.outcome.reasons]


def in_place(results: Results, notes: Notes) -> str:
    """Says who writes the given caches in place: fused operators, on targets that leave this to us, or the model."""
    if not any(one.outcome.writes_caches for found in results.values() for one in found):
        return "by the model"
    by_notes: dict[str, list[str]] = {}
    for name, found in results.items():
        numbers = notes.numbers(copy for one in found for copy in one.outcome.copies)
        by_notes.setdefault(numbers, []).append(short(name))
    return "; ".join(f"not {', '.join(names)} ({numbers})" for numbers, names in by_notes.items() if numbers) or "yes"


def short(spelling: str) -> str:
    """A spelling without the axis on which it is the only one."""
    return f"`{spelling.partition('=')[2] if spelling.count('=') == 1 else spelling}`"


def alike(found: Sequence[Found]) -> str:
    """What fused: once if it is the same in all variants, else with the variants in which it did."""
    texts = {str(one.outcome) for one in found}
    return texts.pop() if len(texts) == 1 else _apart(found)


def _apart(found: Sequence[Found]) -> str:
    by_text: dict[str, list[Found]] = {}
    for one in found:
        by_text.setdefault(str(one.outcome), []).append(one)
    return ", ".join(f"{text} in {_variants(ones)}" for text, ones in by_text.items())


def _variants(found: Iterable[Found]) -> str:
    targets: dict[str, list[str]] = {}
    for one in found:
        targets.setdefault(one.variant, []).append(one.target)
    return " and ".join(name if len(on) == len(TARGETS) else f"{name} on {on[0]}" for name, on in targets.items())


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def rule(head: Sequence[str]) -> str:
    return row(["---"] * len(head))


PLAIN = Tables(
    "coverage",
    (Table(FAMILIES_HEAD, family_cells(), _family_line), Table(ZOO_HEAD, zoo_cells(), _zoo_line)),
)
