"""The tables of what fuses, in README.md, are what the code gives: two lines always, all of them with --slow."""

import pytest
from coverage_table.command import committed, made
from coverage_table.tables import PLAIN

QUICK = ("youtu", "tables")


def test_every_line_is_there():
    assert set(PLAIN.names) <= set(committed(PLAIN)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLAIN.names]
)
def test_line_is_what_the_code_gives(name):
    """If it is not, `python -m mla_fx coverage` makes the table anew."""
    lines, notes = committed(PLAIN)
    assert made(PLAIN, name, notes) == lines[name]
