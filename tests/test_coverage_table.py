"""The tables of docs/coverage.md are what the code gives: one line always, two in CI, all with --campaign."""

import pytest
from coverage_table.command import committed, made
from coverage_table.tables import PLAIN

MARKS = {"tables": (), "youtu": pytest.mark.slow}


def test_every_line_is_there():
    assert set(PLAIN.names) <= set(committed(PLAIN)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.campaign)) for name in PLAIN.names]
)
def test_line_is_what_the_code_gives(name):
    """If not, `python -m mla_fx coverage` regenerates the table."""
    lines, notes = committed(PLAIN)
    assert made(PLAIN, name, notes) == lines[name]
