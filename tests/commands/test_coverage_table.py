"""The tables of docs/coverage.md are what the code gives: two lines in CI, all with --campaign."""

import pytest
from coverage_table.command import committed, made
from coverage_table.quantised import QUANTISED
from coverage_table.tables import PLAIN

IN_CI = ("tables", "int8 weights")
LINES = [
    pytest.param(tables, name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.campaign, id=name)
    for tables in (PLAIN, QUANTISED)
    for name in tables.names
]


@pytest.mark.parametrize("tables", [PLAIN, QUANTISED], ids=lambda tables: tables.mark)
def test_every_line_is_there(tables):
    assert set(tables.names) <= set(committed(tables)[0])


@pytest.mark.parametrize("tables, name", LINES)
def test_line_is_what_the_code_gives(tables, name):
    """If not, `python -m mla_fx coverage` regenerates the table."""
    lines, notes = committed(tables)
    assert made(tables, name, notes) == lines[name]
