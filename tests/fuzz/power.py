"""`python -m tests.fuzz.power --draw 60 --seed 0`: how much does the option `prove` see?

Every refusal of the compiler is removed, one at a time, as refusals.py does. Programs that reach it are judged without
the check of rewrites (see unguarded.py). Where that gives a wrong answer, the same program is judged with the check: it
must refuse the wrong rewrite. Its power is the share of refusals for which it catches every wrong answer. A refusal
whose removal leads to no wrong answer says nothing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .refusals import add_choice, chosen, copied_to, refusals

TWINS = ["soundness"]
CAUGHT, MISSED, UNDECIDED = "caught", "missed", "undecided"  # a wrong answer
HARMLESS, UNREACHED = "no wrong answer", "reached by no program"
FATES = (CAUGHT, MISSED, UNDECIDED, HARMLESS, UNREACHED)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.power", description=__doc__)
    add_choice(parser)
    parser.add_argument("--number", type=int, default=2000, help="how many mutants are drawn")
    parser.add_argument("--tests", nargs="*", default=TWINS, metavar="PATH", help="in tests/: programs to try")
    parser.add_argument("--tried", type=int, default=30, metavar="N", help="programs judged per refusal, at most")
    parser.add_argument("--wrong", type=int, default=3, metavar="N", help="wrong answers per refusal, at most")
    parser.add_argument("--results", type=Path, default=os.devnull, help="a file for results, one line of JSON each")
    given = parser.parse_args(arguments)
    everything = refusals()
    numbers = chosen(everything, given)
    if given.list:
        print(*(everything[number] for number in numbers), f"{len(numbers)} refusals", sep="\n")
        return 0
    programs = {"number": given.number, "seed": given.seed, "tests": given.tests}
    asked = {"numbers": numbers, "programs": programs, "tried": given.tried, "wrong": given.wrong}
    fates = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="power") as folder, given.results.open("a") as results:
        copied_to(Path(folder), everything)
        for line in _told(Path(folder), asked):
            line = {"refusal": str(everything[line["number"]]), "fate": fate(line), **line}
            fates[line["fate"]] += 1
            print(json.dumps(line), file=results, flush=True)
            _show(line)
    print(*(f"{fates[name]:4} {name}" for name in FATES), sep="\n")
    decided = fates[CAUGHT] + fates[MISSED]
    print(f"{fates[CAUGHT]} of {decided} removals that led to wrong answers were caught")
    return bool(fates[MISSED])


def fate(line: dict[str, Any]) -> str:
    """What became of a removal. It is missed if one wrong answer is. Errors and hangs decide nothing."""
    if not line["reached"]:
        return UNREACHED
    if not line["wrong"]:
        return HARMLESS
    verdicts = {wrong["on"]["verdict"] for wrong in line["wrong"]}
    return MISSED if "wrong" in verdicts else CAUGHT if "refuted" in verdicts else UNDECIDED


def _show(line: dict[str, Any]) -> None:
    print(f"{line['fate']}: {line['refusal']}   {line['verdicts']}", flush=True)
    for wrong in line["wrong"]:
        off, on = wrong["off"], wrong["on"]
        print(f"    {on['verdict']}: {on['detail'] or off['detail']}\n        {wrong['program']}", flush=True)


def _told(folder: Path, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of unguarded.py in the copy, as they come."""
    paths = os.pathsep.join((str(folder), str(folder / "tests")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    environment["UNGUARDED"] = json.dumps(asked)
    command = [sys.executable, "-m", "fuzz.unguarded"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield from map(json.loads, process.stdout or ())
    if process.returncode:
        raise SystemExit(f"judging ended with {process.returncode}")


if __name__ == "__main__":
    sys.exit(main())
