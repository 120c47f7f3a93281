"""A pytest plugin for `refusals.py`: tests run with one refusal after another switched off.

Modules are imported and tests collected once, and each run is a fork (see switch.py). A refusal is tried only with the
tests that reach it, the fastest first, until one fails.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .switch import SWITCH, forked

TESTS = Path(__file__).parents[1]
FAILED: list[str] = []


@dataclass(frozen=True)
class Ran:
    """One test, as it went with every refusal in place."""

    name: str
    seconds: float
    failed: bool
    reached: frozenset[int]


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        FAILED.append(report.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: Any) -> bool:
    given = json.loads(os.environ["REFUSALS"])
    unnoticed: list[int] = given["numbers"]
    tell = _Teller(Path(given["told"]))
    for file in given["tests"]:
        items = [item for item in session.items if TESTS / file in (item.path, *item.path.parents)]
        started = time.monotonic()
        ran = forked(lambda items=items: _measured(items), given["seconds"]) or []
        tell(file=file, tests=len(items), ran=len(ran), failing=[one.name for one in ran if one.failed],
             seconds=round(time.monotonic() - started))  # fmt: skip
        for number in list(unnoticed):
            chosen = _quickest([one for one in ran if number in one.reached and not one.failed], given["patience"])
            if not chosen:
                continue
            tell(reached=number, by=len(chosen))
            by_name = {item.nodeid: item for item in items}
            test = _noticed(number, [by_name[name] for name in chosen], given["seconds"])
            if test:
                unnoticed.remove(number)
                tell(noticed=number, by=test)
    tell(unnoticed=unnoticed)
    return True


def _quickest(ran: list[Ran], patience: float) -> list[str]:
    """The names of as many tests as take this many seconds together, and at least one."""
    names, spent = [], 0.0
    for one in sorted(ran, key=lambda one: one.seconds):
        spent += one.seconds
        if names and spent > patience:
            break
        names.append(one.name)
    return names


class _Teller:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _measured(items: list[Any]) -> list[Ran]:
    """Every test once, in order, with all refusals in place."""
    ran = []
    for item, following in zip(items, [*items[1:], None], strict=True):
        SWITCH.reached.clear()
        failures, started = len(FAILED), time.monotonic()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        seconds, failed = time.monotonic() - started, len(FAILED) > failures
        ran.append(Ran(item.nodeid, seconds, failed, frozenset(SWITCH.reached)))
    return ran


def _noticed(number: int, items: list[Any], seconds: float) -> str | None:
    """The first test that fails without the refusal, or what else went wrong; None if all pass."""

    def run() -> str:
        SWITCH.removed = number
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if FAILED:
                return FAILED[0]
        return ""

    result = forked(run, seconds)
    return "a hang or a crash" if result is None else result or None
