"""Regenerates the tables of docs/coverage.md: what fuses in every family, spelling and quantised model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import mla_fx
from mla_fx.commands import CommandError
from mla_fx.debug.optional import require

PROGRAM = "coverage_table"


def run_coverage(only: str) -> int:
    """Run the program next to the zoo, in the tests, and return its exit status. `only` names one line."""
    require("transformers")
    require("rich")
    tests = Path(mla_fx.__file__).parents[1] / "tests"
    if not (tests / PROGRAM).is_dir():
        raise CommandError(f"the models of the table are in the repository, not in the package; {tests} has none.")
    if importlib.util.find_spec("torchao") is None:
        raise CommandError("this needs torchao to quantise models; pip install -e '.[test]' brings it.")
    return subprocess.run([sys.executable, "-m", f"tests.{PROGRAM}", "--only", only], cwd=tests.parent).returncode
