"""`python -m mla_fx coverage`: what fuses in every family, spelling and quantised model, shown and written into
docs/coverage.md."""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from mla_fx.lowering.ascend.stub import environment
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from mla_fx.errors import OptionError

from .npu import NPU
from .quantised import QUANTISED
from .rows import Cell, Found
from .tables import PLAIN, Notes, Tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coverage.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mla_fx coverage", description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once (%(default)s)")
    parser.add_argument("--only", default="", help="a line of a table: shown, not written")
    parser.add_argument("--quantised", action="store_true", help="the table of quantised models alone")
    parser.add_argument("--npu", action="store_true", help="the tables of NPUs alone, where torch_npu can be imported")
    given = parser.parse_args(arguments)
    wanted = [NPU] if given.npu else [QUANTISED] if given.quantised else [PLAIN, QUANTISED]
    names = [name for tables in wanted for name in tables.names]
    if given.only not in ("", *names):
        parser.error(f"{given.only!r} is no line; lines are {', '.join(names)}")
    for tables in wanted:
        _regenerate(tables, given)
    return _on_npus(given) if PLAIN in wanted and given.only in ("", *NPU.names) else 0


def _regenerate(tables: Tables, given: argparse.Namespace) -> None:
    wanted = tables.of_line(given.only)
    if not wanted:
        return
    found = dict(track(_results(wanted, given.processes), total=len(wanted), description=tables.mark))
    text = tables.rendered(_by_line({cell: found[cell] for cell in wanted}))
    Console().print(Markdown(text))
    if not given.only:
        write(tables, text)


def _on_npus(given: argparse.Namespace) -> int:
    """The tables of NPUs, in a process that can import torch_npu."""
    try:
        variables = environment.variables()
    except OptionError as reason:
        Console().print(f"The tables of NPUs stay as they are: {reason}.")
        return 0
    options = ["--npu", "--only", given.only, "--processes", str(given.processes)]
    command = [sys.executable, "-m", "tests.coverage_table", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode


def written(tables: Tables) -> tuple[str, str, str]:
    """The text of the page before some tables, the tables, and the text after them."""
    before, rest = PAGE.read_text(encoding="utf-8").split(f"<!-- {tables.mark} -->\n\n")
    text, after = rest.split(f"\n<!-- end of {tables.mark} -->\n")
    return before, text, after


def committed(tables: Tables) -> tuple[dict[str, str], Notes]:
    """The lines of the tables by their first cell, and the footnotes."""
    _, text, _ = written(tables)
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("|")}
    return lines, Notes({note: int(number) for number, note in re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)})


def made(tables: Tables, name: str, notes: Notes) -> str:
    """A line as the code gives it."""
    return tables.line(name, {cell.column: cell.found() for cell in tables.of_line(name)}, notes)


def write(tables: Tables, text: str) -> None:
    before, _, after = written(tables)
    marks = f"<!-- {tables.mark} -->", f"<!-- end of {tables.mark} -->"
    PAGE.write_text(f"{before}{marks[0]}\n\n{text}\n{marks[1]}\n{after}", encoding="utf-8")


def _results(wanted: list[Cell], processes: int) -> Iterator[tuple[Cell, list[Found]]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start) as pool:
        pending = {pool.submit(_found, cell): cell for cell in wanted}
        for done in as_completed(pending):
            yield pending[done], done.result()


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def _found(cell: Cell) -> list[Found]:
    found = cell.found()
    _settle()
    return found


@functools.cache
def _settle() -> None:
    """After the first cell has loaded all of torch, or each full collection walks it."""
    gc.collect()
    gc.freeze()


def _by_line(found: dict[Cell, list[Found]]) -> dict[str, dict[str, list[Found]]]:
    lines: dict[str, dict[str, list[Found]]] = {}
    for cell, results in found.items():
        lines.setdefault(cell.line, {})[cell.column] = results
    return lines
