"""The lines of the table of what fuses: two of them say that every spelling fuses whole, on both targets."""

import pytest
from coverage_table.rows import cells
from coverage_table.tables import zoo_line


@pytest.mark.parametrize("axis", ["tables", "scale"])
def test_every_spelling_of_an_axis_fuses_whole(axis):
    spellings = {cell.column: cell.found() for cell in cells() if cell.line == axis}
    assert zoo_line(axis, spellings) == f"| {axis} | {len(spellings)} | {len(spellings)} |  |"
