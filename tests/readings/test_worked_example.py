"""What the page about readings shows is what happens."""

import doctest
from pathlib import Path


def test_the_page_runs():
    page = Path(__file__).parents[2] / "docs" / "readings.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert attempted > 10
    assert failed == 0
