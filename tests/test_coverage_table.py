"""The tables of what fuses, in README.md, are what the code gives: two lines always, all of them with --slow."""

import pytest
from coverage_table.command import PLAIN, committed
from coverage_table.rows import cells
from coverage_table.tables import line

QUICK = ("youtu", "tables")
LINES = list(dict.fromkeys(cell.line for cell in cells()))


def test_every_line_is_there():
    assert set(LINES) <= set(committed(PLAIN)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LINES]
)
def test_line_is_what_the_code_gives(name):
    """If it is not, `python -m mla_fx coverage` makes the table anew."""
    lines, notes = committed(PLAIN)
    found = {cell.column: cell.found() for cell in cells() if cell.line == name}
    assert line(name, found, notes) == lines[name]
