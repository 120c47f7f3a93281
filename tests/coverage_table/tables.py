"""The tables as Markdown, and their lines. Cells are short: what several variants share is said once, and reasons are
numbered footnotes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from families import COUNTS_FLAGS, FAMILIES

from .outcome import TARGETS
from .rows import STEPS, Cell, Found, cells

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
class Tables:
    """Two tables, of families by step and of the zoo by axis: their mark on the page, their cells, and how heads and
    lines are made. A line adds its notes to those of the tables."""

    mark: str
    cells: Sequence[Cell]
    families_head: Sequence[str]
    family_line: Line
    zoo_head: Sequence[str]
    zoo_line: Line

    @property
    def names(self) -> list[str]:
        """Of the lines, in order."""
        return list(dict.fromkeys(cell.line for cell in self.cells))

    def of_line(self, name: str) -> list[Cell]:
        return [cell for cell in self.cells if name in ("", cell.line)]

    def line(self, name: str, found: Results, notes: Notes) -> str:
        return (self.family_line if name in FAMILIES else self.zoo_line)(name, found, notes)

    def rendered(self, lines: Mapping[str, Results]) -> str:
        notes, text = Notes(), []
        for head, is_family in ((self.families_head, True), (self.zoo_head, False)):
            text += [row(head), rule(head)]
            text += [self.line(name, found, notes) for name, found in lines.items() if (name in FAMILIES) == is_family]
            text += [""]
        return "\n".join([*text, *notes.lines()]) + "\n"


def _family_line(family: str, steps: Results, notes: Notes) -> str:
    every = [one for found in steps.values() for one in found]
    said = [EAGER] if all(one.variant != "sdpa" for one in every) else []
    said += [FLAG] if family in COUNTS_FLAGS else []
    columns = (_alike(part) for found in steps.values() for part in fixed_and_dynamic(found))
    return row((family, *columns, _in_place(steps, notes), notes.numbers([*said, *reasons(every)])))


def _zoo_line(axis: str, spellings: Results, notes: Notes) -> str:
    """Spellings that fuse less in some variants only are named."""
    lacking = {name: less for name, found in spellings.items() if (less := [one for one in found if not one.is_whole])}
    parts = []
    for name, less in lacking.items():
        what = _alike(less) if len(less) == len(spellings[name]) else _apart(less)
        parts.append(f"{short(name)}: {what} ({notes.numbers(reasons(less))})")
    return row((axis, len(spellings), len(spellings) - len(lacking), "; ".join(parts), _in_place(spellings, notes)))


def fixed_and_dynamic(found: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    return [one for one in found if not one.is_dynamic], [one for one in found if one.is_dynamic]


def reasons(found: Iterable[Found]) -> list[str]:
    return [reason for one in found for reason in one.outcome.reasons]


def _in_place(results: Results, notes: Notes) -> str:
    """Whether the given caches are written in place, by the fused operators of targets that leave this to us."""
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


def _alike(found: Sequence[Found]) -> str:
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


PLAIN = Tables("coverage", list(cells()), FAMILIES_HEAD, _family_line, ZOO_HEAD, _zoo_line)
