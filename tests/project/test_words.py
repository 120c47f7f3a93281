"""Sentences are plain: the give-away words of a translated text are in no message, docstring, comment or page, and a
docstring opens with its subject or its verb."""

import re

import pytest
from lib.sources import ROOT, check_each

CODE = ("mla_fx", "patterns", "lowering", "benchmarks", "examples", "tests")
WORDS = re.compile(
    r"\b(of which|whoever|whosoever|by your word|is to be had|thereof|stands for|as it came|taken for|"
    r"held against|hangs on|is of no matter)\b",
    re.IGNORECASE,
)
OPENINGS = re.compile(r'"""(?:That of|Those of|Of|As|By) ')
FILES = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "test_words.py"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def translated(text):
    """Words of a translated text, also where a line ends between them."""
    return WORDS.findall(re.sub(r"\s+(# )?", " ", text))


def test_plain_words():
    check_each([*FILES, *PAGES], lambda path: translated(path.read_text(encoding="utf-8")), "Words are plain")


def test_docstrings_open_with_a_subject():
    check_each(FILES, lambda path: OPENINGS.findall(path.read_text(encoding="utf-8")), "Docstrings open with a subject")


def test_a_file_that_breaks_a_rule_is_named():
    assert translated("    # hangs\n    # on") == ["hangs on"]
    with pytest.raises(AssertionError, match=r"^Words are plain. Files that break this: README.md \(one, two\)\."):
        check_each([ROOT / "README.md"], lambda _: ["one", "two"], "Words are plain")
