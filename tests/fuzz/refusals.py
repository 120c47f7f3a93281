"""`python -m tests.fuzz.refusals --draw 60 --seed 0`: tests of the tests.

Every refusal of the compiler is removed, one at a time, in a copy of the repository: each `raise NoMatch(...)`, and
each guard that returns None, False or nothing. Tests run in the copy, quick ones first, until one fails. A refusal
whose removal no test notices is either not needed or not tested.
"""

from __future__ import annotations

import argparse
import ast
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
REFUSING = ("mla_fx/canonical", "mla_fx/readings", "patterns", "mla_fx/operands.py", "mla_fx/masks.py",
            "mla_fx/reinplace.py")  # fmt: skip
TESTS = ("test_rules", "test_match", "test_reinplace", "test_soundness", "test_canonical", "test_readings", "test_fuzz")
COPIED = ("mla_fx", "patterns", "lowering", "tests", "pyproject.toml")
INSIDE = ("patterns", "lowering")  # folders of the repository that are packages inside mla_fx
SECONDS = 600


@dataclass(frozen=True)
class Refusal:
    path: str
    line: int
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"

    def removed(self, source: str) -> str:
        """The source with `pass` in its place. What a guard tests is still evaluated."""
        return source[: self.start] + "pass" + source[self.end :]


# --- what is removed -------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    for place in REFUSING:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.exists():
                yield from _refusals_in(file)


def _refusals_in(file: Path) -> Iterator[Refusal]:
    source = file.read_text()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        for statement in _refusing(node):
            start = starts[statement.lineno - 1] + statement.col_offset
            end = starts[statement.end_lineno - 1] + statement.end_col_offset
            text = source[start:end] if isinstance(node, ast.Raise) else f"if {ast.unparse(node.test)}: return ..."
            yield Refusal(str(file.relative_to(ROOT)), statement.lineno, start, end, re.sub(r"\s+", " ", text)[:110])


def _refusing(node: ast.AST) -> list[ast.stmt]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _name(node.exc.func) == "NoMatch":
        return [node]
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Return):
        value = node.body[0].value
        if value is None or (isinstance(value, ast.Constant) and value.value in (None, False)):
            return [node.body[0]]
    return []


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


# --- a copy in which tests run ---------------------------------------------------------------------------------------


class Scratch:
    """A copy of the repository. The two packages that lie outside mla_fx are linked into it, so that an installed
    mla_fx is not asked for them."""

    def __init__(self, folder: Path, tests: list[str]) -> None:
        self.folder, self.tests = folder, tests
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        for name in INSIDE:
            (folder / "mla_fx" / name).symlink_to(folder / name)

    def noticed_by(self, refusal: Refusal, left_out: list[str]) -> str | None:
        """The first test that fails without the refusal, or what else went wrong; None where all is well."""
        file = self.folder / refusal.path
        source = file.read_text()
        file.write_text(refusal.removed(source))
        try:
            code, output = self.pytest("-x", *(f"--deselect={name}" for name in left_out))
        finally:
            file.write_text(source)
        failed = failures(output)
        return None if code == 0 else failed[0] if failed else f"pytest ended with {code}"

    def pytest(self, *options: str) -> tuple[int, str]:
        tests = [f"tests/{name}.py" for name in self.tests if (self.folder / f"tests/{name}.py").exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124, ""
        return process.returncode, output


def failures(output: str) -> list[str]:
    found = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    return [name.strip() for name in found]


# --- the run ---------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.refusals", description=__doc__)
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="N of them, drawn by the seed; else all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose file and text contain this")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="NAME", help="files in tests/, quick ones first")
    parser.add_argument("--list", action="store_true", help="show what would be removed, and stop")
    given = parser.parse_args()
    chosen = [refusal for refusal in refusals() if given.only in str(refusal)]
    total = len(chosen)
    if given.draw:
        chosen = Random(given.seed).sample(chosen, min(given.draw, total))
    if given.list:
        print(*chosen, f"{total} refusals", sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="refusals") as folder:
        unnoticed = _remove_each(
            chosen, [Scratch(Path(folder) / str(number), given.tests) for number in range(given.workers)]
        )
    print(f"\n{len(chosen) - len(unnoticed)} of {len(chosen)} removed refusals were noticed ({total} in all)")
    print(*(f"nobody noticed {refusal}" for refusal in unnoticed), sep="\n")
    return bool(unnoticed)


def _remove_each(chosen: list[Refusal], scratches: list[Scratch]) -> list[Refusal]:
    copies: queue.Queue[Scratch] = queue.Queue()
    for scratch in scratches:
        copies.put(scratch)
    left_out = _failing_anyway(scratches[0])

    def judge(refusal: Refusal) -> str | None:
        scratch = copies.get()
        try:
            return scratch.noticed_by(refusal, left_out)
        finally:
            copies.put(scratch)

    unnoticed = []
    with ThreadPoolExecutor(len(scratches)) as pool:
        for refusal, test in zip(chosen, pool.map(judge, chosen), strict=True):
            print(f"{'noticed' if test else 'NOBODY '} {refusal}" + (f"   by {test}" if test else ""), flush=True)
            if test is None:
                unnoticed.append(refusal)
    return unnoticed


def _failing_anyway(scratch: Scratch) -> list[str]:
    """Tests that fail with every refusal in place say nothing about any."""
    code, output = scratch.pytest()
    failing = failures(output)
    if code not in (0, 1) or (code and not failing):
        raise SystemExit(f"the tests do not run: pytest ended with {code}\n{output[-2000:]}")
    print(f"{len(failing)} tests fail as it is and are left out", flush=True)
    return failing


if __name__ == "__main__":
    sys.exit(main())
