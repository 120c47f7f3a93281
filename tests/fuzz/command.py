"""`python -m tests.fuzz --number 2000 --seed 0 --processes 2`: a campaign, and a table of its verdicts.

An interrupt ends it early: the table is of the pieces that were judged."""

from __future__ import annotations

import argparse
import ast
import functools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from rich.console import Console
from rich.table import Table

from .bases import BASES
from .campaign import Result, Tally, batches, campaign, everywhere, judged, quiet
from .draw import INSERTIONS
from .judge import FAILURES, SAME
from .reduce import Mutant
from .scenes import SCENES

BATCH = 500  # at least this many of one base per process, which captures it once
SHOWN = 8  # failures of one kind


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--number", type=int, default=1000, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--base", choices=sorted(BASES), metavar="NAME", help="mutants of this one only")
    parser.add_argument("--scene", choices=sorted(SCENES), help="mutants of this kind only")
    parser.add_argument(
        "--everywhere", choices=sorted(INSERTIONS), metavar="NAME", help="instead: this at every use of every value"
    )
    parser.add_argument("--replay", help="judge one mutant again: the line that was printed for it")
    given = parser.parse_args(arguments)
    start()
    if given.replay:
        return _replay(given.replay)
    began = time.perf_counter()
    tally = Tally()
    console = Console(width=200)
    try:
        for results in _results(given):
            _tell(console, results)
            for result in results:
                tally.add(result)
    except KeyboardInterrupt:
        console.print("interrupted")
    show(console, tally)
    seconds = time.perf_counter() - began
    number = sum(tally.verdicts.values())
    console.print(f"{number} mutants, seed {given.seed}, {seconds:.0f} s, {number / seconds:.1f} a second")
    return bool(tally.failures)


def start() -> None:
    torch.set_num_threads(1)
    quiet()


def _results(given: argparse.Namespace) -> Iterator[list[Result]]:
    """The results of each piece as it ends."""
    pieces = _pieces(given)
    if given.processes == 1:
        yield from (piece() for piece in pieces)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, mp_context=context, initializer=start) as pool:
        try:
            for done in as_completed([pool.submit(piece) for piece in pieces]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # else an interrupt would wait for all pieces


def _pieces(given: argparse.Namespace) -> list[Callable[[], list[Result]]]:
    if given.everywhere:
        bases = [given.base] if given.base else list(BASES)
        return [functools.partial(_everywhere, base, given.seed, given.everywhere) for base in bases]
    drawn = [(given.base, range(given.number))] if given.base else batches(given.number, BATCH)
    return [functools.partial(_drawn, base, given.seed, numbers, given.scene) for base, numbers in drawn]


def _drawn(base: str, seed: int, numbers: range, scene: str | None) -> list[Result]:
    return list(campaign(base, seed, numbers, scene))


def _everywhere(base: str, seed: int, kind: str) -> list[Result]:
    return list(judged(base, everywhere(base, seed, kind)))


def _replay(line: str) -> int:
    base, mutations = ast.literal_eval(line)
    outcome = Mutant(base, tuple(tuple(mutation) for mutation in mutations)).judge()
    print(outcome.verdict, outcome.detail, outcome.fused)
    return outcome.is_failure


# --- what is shown ---------------------------------------------------------------------------------------------------


def _tell(console: Console, results: list[Result]) -> None:
    """One line on a piece, and one on each of its failures."""
    failures = [result for result in results if result.outcome.is_failure]
    lines = [f"{results[0].mutant.base}: {len(results)} judged, {len(failures)} failed"]
    lines += [f"{result.outcome.verdict}: {result.reduced or result.mutant}" for result in failures]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show(console: Console, tally: Tally) -> None:
    console.print(_verdicts(tally))
    console.print(_kinds(tally))
    for name, failures in sorted(tally.distinct.items()):
        console.print(f"[b]{name}[/b] ({len(failures)})")
        for line, result in list(failures.items())[:SHOWN]:
            outcome = result.reduced_outcome or result.outcome
            console.print(f"    {outcome.detail}\n        {line}", markup=False, highlight=False, soft_wrap=True)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _verdicts(tally: Tally) -> Table:
    table = Table("verdict", "mutants", "share", title="What became of the mutants")
    total = sum(tally.verdicts.values())
    for verdict in (*SAME, *FAILURES, "invalid"):
        table.add_row(verdict, str(tally.verdicts[verdict]), _share(tally.verdicts[verdict], total))
    table.add_section()
    valid, kept = sum(tally.changing.values()), tally.preserving["kept"]
    fused = tally.changing["fused"]
    table.add_row("changing, valid, fused", f"{fused} of {valid}", _share(fused, valid))
    preserving = kept + tally.preserving["lost"]
    table.add_row("preserving, fused as before", f"{kept} of {preserving}", _share(kept, preserving))
    table.add_row("strides of an output differ", str(tally.strides), "")
    return table


def _kinds(tally: Tally) -> Table:
    table = Table("mutation", *SAME, *FAILURES, "invalid", "alone it keeps what fuses", title="By kind")
    for kind in sorted(tally.kinds):
        counts: Counter[str] = tally.kinds[kind]
        whole = tally.alone[kind]
        kept = f"{whole - tally.lost[kind]} of {whole}" if whole else ""
        table.add_row(kind, *(str(counts[verdict] or "") for verdict in (*SAME, *FAILURES, "invalid")), kept)
    return table
