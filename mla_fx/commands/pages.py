"""Writes pages anew: the tables of docs/coverage.md, which say what fuses in every family, spelling and quantised
model; and the pages of dumped graphs, with one that lists them."""

import html
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import mla_fx
from mla_fx.commands import CommandError
from mla_fx.debug import require
from mla_fx.debug.dump import page

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


def run_report(folder: Path) -> Path:
    """Write `page.html` beside each `graph.json`, and `index.html` with a link to each. Raises CommandError."""
    found = sorted(folder.glob("graph_*/graph.json")) or [*folder.glob("graph.json")]
    if not found:
        raise CommandError(f"{folder} holds no dump; option dump or the variable MLA_FX_DUMP makes one.")
    items = []
    for path in found:
        data = json.loads(path.read_text(encoding="utf-8"))
        (file := path.with_name("page.html")).write_text(page(data), encoding="utf-8")
        link = html.escape(str(file.relative_to(folder)))
        items.append(f'<li><a href="{link}">{html.escape(path.parent.name)}</a>: {html.escape(data["outcome"])}</li>')
    index = folder / "index.html"
    lines = ['<!doctype html><html lang="en"><meta charset="utf-8"><title>mla_fx</title>', "<h1>Graphs</h1><ul>"]
    index.write_text("\n".join([*lines, *items, "</ul></html>", ""]), encoding="utf-8")
    print(index)
    return index
