"""What the operators' reference page says about the tests."""

import importlib
import re
from pathlib import Path

from lib.operators.harness import CATALOGUE, DTYPES, cases

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "operators.md"


def compared_with_an_oracle():
    """The ids of the samples that the tests named test_sample_against_oracle run on."""
    for path in sorted(HERE.glob("test_*.py")):
        test = getattr(importlib.import_module(f"ops.{path.stem}"), "test_sample_against_oracle", None)
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "parametrize":
                yield from (case.id for case in mark.args[1])


def test_every_sample_is_compared_with_an_oracle():
    assert set(compared_with_an_oracle()) == {case.id for case in cases(DTYPES)}


def test_every_operator_is_in_the_table():
    named = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(CATALOGUE)


def test_every_decision_names_a_test():
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    assert [name for name in named if f"def {name}(" not in tests] == []
