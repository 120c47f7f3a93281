"""A report as a table: for terminals through rich, for notebooks as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .optional import require
from .outcomes import Layers, rows_of

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = ("layers", "fused", "why not more")
# In each cell: notebooks have a rule of their own for cells, by which they align to the right.
CELL = 'style="text-align: left; padding: 0.3em 0.6em; border: 1px solid"'


Cells = Iterable[tuple[str, str, str]]


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
