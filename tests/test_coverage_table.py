"""The table of what fuses, in README.md, is what the code gives: two of its lines always, all of them with --slow."""

import re

import pytest
from coverage_table.command import written
from coverage_table.rows import cells
from coverage_table.tables import Notes, line

QUICK = ("youtu", "tables")
LINES = list(dict.fromkeys(cell.line for cell in cells()))


def committed():
    """The lines of the tables by their first cell, and the numbered sentences."""
    _, text, _ = written()
    lines = {row.split(" | ")[0].removeprefix("| "): row for row in text.splitlines() if row.startswith("|")}
    return lines, Notes({note: int(number) for number, note in re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)})


def test_every_line_is_there():
    assert set(LINES) <= set(committed()[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LINES]
)
def test_line_is_what_the_code_gives(name):
    """If it is not, `python -m mla_fx coverage` makes the table anew."""
    lines, notes = committed()
    found = {cell.column: cell.found() for cell in cells() if cell.line == name}
    assert line(name, found, notes) == lines[name]
