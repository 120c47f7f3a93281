"""`python -m tests.fuzz.refusals --draw 60 --seed 0`: tests of the tests.

Every refusal of the compiler is removed, one at a time, in a copy of the repository: each `raise NoMatch(...)`, each
guard that returns None, False or nothing, and each `None if ... else ...` that is returned. Tests run in the copy,
quick ones first, until one fails (see removal.py): the first tier, then the slow tests. A refusal whose removal no test
notices is either not needed or not tested.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
REFUSING = (
    "mla_fx/readings", "patterns", "mla_fx/matching", "mla_fx/rewriting", "mla_fx/passes/reinplace.py",
    "mla_fx/passes/repeat.py", "mla_fx/graph/schemas.py",
)  # fmt: skip
TESTS = (
    "matching", "readings", "patterns/test_rules.py", "rewriting", "passes/test_repeat.py", "project/test_layout.py",
    "passes/test_reinplace_refusals.py", "passes/test_reinplace.py",
    "soundness", "patterns/test_pieces.py", "patterns/test_projections.py", "patterns/test_combined_caches.py",
    "patterns/test_paged_contexts.py", "patterns/test_paged_heads.py", "patterns/test_coded_heads.py",
    "passes/test_unlike_layers.py", "patterns/test_positions.py", "patterns/test_reasons.py",
    "patterns/test_slices.py", "whole/test_servers.py", "patterns/test_quantised_weights.py", "whole/test_stability.py",
    "whole/test_zoo.py", "whole/test_fuzz.py",
)  # fmt: skip
COPIED = ("mla_fx", "patterns", "lowering", "tests", "docs", "pyproject.toml")
INSIDE = ("patterns", "lowering")  # folders of the repository that are packages inside mla_fx
TIERS = [[], ["--slow", "-m", "slow"]]
SECONDS = 900  # per test file, or per removal in one


@dataclass(frozen=True)
class Refusal:
    """`asks` are what is inserted into the source, and where, so that the refusal only happens if the switch says
    so."""

    path: str
    line: int
    text: str
    asks: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


# --- what is removed -------------------------------------------------------------------------------------------------


def refusals() -> list[Refusal]:
    files: list[Path] = []
    for place in REFUSING:
        path = ROOT / place
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [refusal for file in files for refusal in _refusals_in(file)]


def _refusals_in(file: Path) -> Iterator[Refusal]:
    source = file.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for part, asks in _refusing(node):
            text = re.sub(r"\s+", " ", ast.unparse(node if isinstance(node, ast.If) else part))[:110]
            places = tuple((starts[line - 1] + column, ask) for line, column, ask in asks)
            yield Refusal(str(file.relative_to(ROOT)), part.lineno, text, places)


Ask = tuple[int, int, str]  # line, column, inserted text


def _refusing(node: ast.AST) -> Iterator[tuple[ast.stmt, list[Ask]]]:
    """The refusals in a statement. `#` in the text is replaced by the number of the refusal."""
    if isinstance(node, ast.Raise) and (node.exc is None or _name(node.exc) == "NoMatch"):
        yield node, [(node.lineno, node.col_offset, "if _is_made(#): ")]
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Return):
        [guarded] = node.body
        if _is_nothing(guarded.value):
            yield guarded, [(guarded.lineno, guarded.col_offset, "if _is_made(#): ")]
    if isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
        choice = node.value
        opened = (choice.test.lineno, choice.test.col_offset, "(")
        if _is_nothing(choice.body):
            yield node, [opened, (choice.test.end_lineno, choice.test.end_col_offset, ") and _is_made(#)")]
        elif _is_nothing(choice.orelse):
            yield node, [opened, (choice.test.end_lineno, choice.test.end_col_offset, ") or not _is_made(#)")]


def _is_nothing(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and (value.value is None or value.value is False))


def _name(call: ast.expr) -> str:
    function = call.func if isinstance(call, ast.Call) else call
    return getattr(function, "id", getattr(function, "attr", ""))


# --- a copy in which tests run ---------------------------------------------------------------------------------------


def copied_to(folder: Path, asked: list[Refusal]) -> None:
    """Make a copy of the repository in which every refusal asks first. The two packages outside mla_fx are linked into
    it, so that they are not imported from an installed mla_fx."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    for name in INSIDE:
        (folder / "mla_fx" / name).symlink_to(folder / name)
    for path in {refusal.path for refusal in asked}:
        asks = [
            (place, ask.replace("#", str(number)))
            for number, refusal in enumerate(asked)
            if refusal.path == path
            for place, ask in refusal.asks
        ]
        source = (ROOT / path).read_text()
        for place, ask in sorted(asks, reverse=True):
            source = source[:place] + ask + source[place:]
        (folder / path).write_text(source)


def run_tests(folder: Path, tests: list[str], numbers: list[int], patience: float, tier: list[str]) -> Iterator[dict]:
    """Yield removal.py's results for the refusals with these numbers, as they come. `tier` are options of pytest."""
    told = folder / "told"
    told.write_text("")
    given = {"tests": tests, "numbers": numbers, "told": str(told), "seconds": SECONDS, "patience": patience}
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.fuzz.removal",
        f"--basetemp={folder}/temporary", *tier, *(f"tests/{name}" for name in tests),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "REFUSALS": json.dumps(given)}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    with told.open() as lines:
        while True:
            ended = process.poll() is not None
            while line := lines.readline():
                yield json.loads(line)
            if ended:
                break
            time.sleep(0.2)
    if process.returncode not in (0, 5):
        raise SystemExit(f"pytest ended with {process.returncode}\n{(folder / 'output').read_text()[-2000:]}")


# --- the choice ------------------------------------------------------------------------------------------------------


def add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="N of them, drawn by the seed; else all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose file and text contain this")
    parser.add_argument("--list", action="store_true", help="show what would be removed, and stop")


def chosen(everything: list[Refusal], given: argparse.Namespace) -> list[int]:
    """The numbers of the refusals to remove."""
    numbers = [number for number, refusal in enumerate(everything) if given.only in str(refusal)]
    return Random(given.seed).sample(numbers, min(given.draw, len(numbers))) if given.draw else numbers


# --- the run ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.refusals", description=__doc__)
    add_choice(parser)
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="in tests/, quick ones first")
    parser.add_argument("--patience", type=float, default=20, metavar="S", help="seconds for one removal in one file")
    parser.add_argument("--first-tier", action="store_true", help="leave out the slow tests")
    given = parser.parse_args()
    everything = refusals()
    numbers = chosen(everything, given)
    if given.list:
        print(*(everything[number] for number in numbers), f"{len(numbers)} refusals", sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="refusals") as folder:
        copied_to(Path(folder), everything)
        unnoticed = dict.fromkeys(numbers, "")
        for tier in TIERS[:1] if given.first_tier else TIERS:
            run = run_tests(Path(folder), given.tests, list(unnoticed), given.patience, tier)
            unnoticed = _reported(run, everything)
            noticed = len(numbers) - len(unnoticed)
            print(f"\n{noticed} of {len(numbers)} removed refusals were noticed ({len(everything)} in all)", flush=True)
    print(*(f"nobody noticed {everything[number]}{how}" for number, how in unnoticed.items()), sep="\n")
    return bool(unnoticed)


def _reported(told: Iterator[dict], everything: list[Refusal]) -> dict[int, str]:
    """Print results as they come; return the unnoticed refusals, and whether a test reaches them."""
    reached: dict[int, int] = {}
    unnoticed: list[int] = []
    for line in told:
        if "file" in line:
            print(f"{line['file']}: {line['ran']} of {line['tests']} tests ran, {line['seconds']} s", flush=True)
            print(*(f"left out, it fails as it is: {name}\n" for name in line["failing"]), sep="", end="", flush=True)
        elif "reached" in line:
            reached[line["reached"]] = reached.get(line["reached"], 0) + line["by"]
        elif "noticed" in line:
            print(f"noticed {everything[line['noticed']]}   by {line['by']}", flush=True)
        else:
            unnoticed = line["unnoticed"]
    return {number: f"   reached by {reached.get(number, 0)} tests" for number in unnoticed}


if __name__ == "__main__":
    sys.exit(main())
