"""`python -m mla_fx coverage`: what fuses in every family and spelling, shown and written into README.md."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from .rows import Cell, Found, cells
from .tables import rendered

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- coverage -->\n\n", "\n<!-- end of coverage -->\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mla_fx coverage", description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once (%(default)s)")
    parser.add_argument("--only", default="", help="a family or an axis of the zoo: shown, not written")
    given = parser.parse_args(arguments)
    wanted = [cell for cell in cells() if given.only in ("", cell.line)]
    if not wanted:
        parser.error(f"{given.only!r} is no line; lines are {', '.join(dict.fromkeys(cell.line for cell in cells()))}")
    found = dict(track(_results(wanted, given.processes), total=len(wanted), description="compiling"))
    text = rendered(_by_line({cell: found[cell] for cell in wanted}))
    Console().print(Markdown(text))
    if not given.only:
        write(text)
    return 0


def written() -> tuple[str, str, str]:
    """What stands in README.md before the tables, the tables, and what comes after."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    text, after = rest.split(END)
    return before, text, after


def write(text: str) -> None:
    before, _, after = written()
    README.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


def _results(wanted: list[Cell], processes: int) -> Iterator[tuple[Cell, list[Found]]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_start) as pool:
        pending = {pool.submit(cell.found): cell for cell in wanted}
        for done in as_completed(pending):
            yield pending[done], done.result()


def _start() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.freeze()  # or each full collection walks all of torch


def _by_line(found: dict[Cell, list[Found]]) -> dict[str, dict[str, list[Found]]]:
    lines: dict[str, dict[str, list[Found]]] = {}
    for cell, results in found.items():
        lines.setdefault(cell.line, {})[cell.column] = results
    return lines
