"""Sentences are plain: the give-away words of a translated text are in no message, docstring, comment or page, and a
docstring opens with its subject or its verb."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("mla_fx", "patterns", "lowering", "benchmarks", "examples", "tests")
WORDS = re.compile(
    r"\b(of which|whoever|whosoever|by your word|is to be had|thereof|stands for|as it came|taken for|"
    r"held against|hangs on|is of no matter)\b",
    re.IGNORECASE,
)
OPENINGS = ("That of ", "Those of ", "Of ", "As ", "By ")
FILES = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "test_words.py"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def sentences(path):
    """Strings, docstrings and comments of a program; all of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [text]
    kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    return [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type in kinds]


@pytest.mark.parametrize("path", [*FILES, *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_plain_words(path):
    assert [found.group() for text in sentences(path) for found in WORDS.finditer(" ".join(text.split()))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_open_with_a_subject(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = [node.value.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and is_text(node.value)]
    assert [text for text in texts if text.startswith(OPENINGS)] == []


def is_text(value):
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
