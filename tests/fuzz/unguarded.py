"""Mutants that are judged with one refusal after another switched off, without and with the option `prove`; runs in the
copy that power.py makes."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .campaign import batches, mutants
from .command import start
from .found import FOUND
from .judge import Outcome
from .reduce import Mutant
from .switch import SWITCH, forked
from .twins import compiled_by, rejected

CACHING = ("mla_fx.graph.", "mla_fx.readings.")  # a result that is kept would hide a refusal
BATCH = 100
SECONDS = 60  # per program
HANGS, BROKEN = 3, 8  # after which a refusal is given up


class Judged(Protocol):
    """A mutant, or a twin."""

    base: str

    def judge(self, **options: Any) -> Outcome: ...


@dataclass(frozen=True)
class Ran:
    """A program, as it went with every refusal in place."""

    program: Judged
    seconds: float
    reached: frozenset[int]


def main() -> None:
    """Print a line of JSON on each refusal."""
    given = json.loads(os.environ["UNGUARDED"])
    start()
    ran = list(_measured(_programs(**given["programs"])))
    alone = {one.program.base: one.reached for one in ran if one.program == Mutant(one.program.base)}
    for number in given["numbers"]:
        reaching = [one.program for one in _chosen(number, ran, alone)]
        verdicts, wrong = _tried(number, reaching[: given["tried"]], given["wrong"])
        line = {"number": number, "reached": len(reaching), "verdicts": verdicts, "wrong": wrong}
        print(json.dumps(line), flush=True)


def _tried(number: int, programs: list[Judged], most: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The verdicts without the check, and those with it on at most so many programs that are wrong then."""
    verdicts, wrong = Counter[str](), list[dict[str, Any]]()
    for program in programs:
        off = _without(number, program, prove="off")
        verdicts[off.verdict] += 1
        if off.verdict == "wrong":
            on = _without(number, program, prove="on")
            wrong.append({"program": str(program), "off": asdict(off), "on": asdict(on)})
        if len(wrong) == most or verdicts["hang"] == HANGS or verdicts["fallback"] == BROKEN:
            break
    return verdicts, wrong


def _programs(number: int, seed: int, tests: list[str]) -> Iterator[Judged]:
    """Failures that were found once, twins, and mutants of all bases, each base before its mutants."""
    yield from itertools.chain.from_iterable(FOUND.values())
    yield from rejected()
    for base, numbers in batches(number, BATCH):
        if numbers:
            yield Mutant(base)
            yield from (mutant for mutant, _ in mutants(base, seed, numbers))
    yield from compiled_by(tests)  # last: tests leave torch's configuration otherwise


def _measured(programs: Iterator[Judged]) -> Iterator[Ran]:
    """What says nothing about a refusal, because it is already wrong or no program, is left out."""
    for program in programs:
        _forget()
        SWITCH.reached.clear()
        began = time.monotonic()
        outcome = program.judge()
        if outcome.verdict in ("fused", "unfused"):
            yield Ran(program, time.monotonic() - began, frozenset(SWITCH.reached))


def _chosen(number: int, ran: list[Ran], alone: dict[str, frozenset[int]]) -> list[Ran]:
    """What reaches a refusal: first by its mutations alone, then the quickest, and not all of one base."""
    seen = Counter[str]()
    ranked = []
    for one in sorted((one for one in ran if number in one.reached), key=lambda one: one.seconds):
        base = one.program.base
        ranked.append((number in alone.get(base, ()), seen[base], one))
        seen[base] += 1
    return [one for *_, one in sorted(ranked, key=lambda each: each[:2])]


def _without(number: int, program: Judged, prove: str) -> Outcome:
    def work() -> Outcome:
        SWITCH.removed = number
        _forget()
        return program.judge(prove=prove)

    return forked(work, SECONDS) or Outcome("hang", "a hang or a crash")


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith(CACHING) else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


if __name__ == "__main__":
    main()
