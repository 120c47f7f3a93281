"""What fuses on NPUs: the tables in README.md are what the code gives, a line always, all of them with --slow."""

import pytest
from coverage_table.command import NPU, committed
from coverage_table.npu import cells, line

LINES = list(dict.fromkeys(cell.line for cell in cells()))


def test_every_line_is_there():
    assert set(LINES) <= set(committed(NPU)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tables" else pytest.mark.slow) for name in LINES]
)
def test_line_is_what_the_code_gives(name):
    """If it is not, `python -m mla_fx coverage` makes the tables anew."""
    lines, notes = committed(NPU)
    found = {cell.column: cell.found() for cell in cells() if cell.line == name}
    assert line(name, found, notes) == lines[name]
