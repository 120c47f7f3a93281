"""The NPU tables of docs/coverage.md are what the code gives: one line always, all with --campaign."""

import pytest
from coverage_table.command import committed, made
from coverage_table.npu import NPU


def test_every_line_is_there():
    assert set(NPU.names) <= set(committed(NPU)[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tables" else pytest.mark.campaign) for name in NPU.names]
)
def test_line_is_what_the_code_gives(name):
    """If it is not, `python -m mla_fx coverage` makes the tables anew."""
    lines, notes = committed(NPU)
    assert made(NPU, name, notes) == lines[name]
