"""What the page about readings shows is what happens."""

import doctest
from pathlib import Path

import mla_fx.readings


def test_the_page_runs():
    page = Path(next(iter(mla_fx.readings.__path__))) / "README.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert attempted > 10
    assert failed == 0
