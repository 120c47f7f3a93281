"""The table of what fuses in README.md is what the code gives: a few of its lines, and all of them with --slow."""

import pytest
from coverage_table.command import README
from coverage_table.rows import AXES, FAMILIES, FamilyCell, cells
from coverage_table.tables import family_line, zoo_line

QUICK = ("tables", "scale")


def at_each_line():
    lines = [*FAMILIES, *AXES]
    return [pytest.param(line, marks=() if line in QUICK else pytest.mark.slow) for line in lines]


@pytest.mark.parametrize("line", at_each_line())
def test_line(line):
    wanted = [cell for cell in cells() if cell.line == line]
    render = family_line if isinstance(wanted[0], FamilyCell) else zoo_line
    made = render(line, {cell.column: cell.found() for cell in wanted})
    assert made in README.read_text(encoding="utf-8").split("\n")
