"""Finds the first rewrite that makes a program's answer wrong."""

from __future__ import annotations

import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mla_fx.backend import limited
from mla_fx.commands import CommandError
from mla_fx.comparing.closeness import Closeness
from mla_fx.debug.optional import require
from mla_fx.errors import MlaWarning, OptionError
from mla_fx.passes.fuel import VARIABLE, Fuel, Rewrite

from .answers import Answers, Judge
from .demo import progress
from .models import Call, script_call

Tell = Callable[[str], None]
ALL = sys.maxsize  # a limit, too, so that no cache answers


@dataclass(frozen=True)
class Step:
    """A run with the first `fuel` rewrites, and how close its answers are."""

    fuel: int
    found: Mapping[str, Closeness]
    rewrites: tuple[Rewrite, ...] = ()
    failure: str = ""

    @property
    def worst(self) -> Closeness:
        if self.failure:
            return Closeness(self.failure, math.inf, 0.0, math.inf)
        return max(self.found.values(), key=lambda one: one.share, default=Closeness("nothing", 0.0, 0.0, 0.0))

    @property
    def is_wrong(self) -> bool:
        return not self.worst.share <= 1

    def __str__(self) -> str:
        verdict = "wrong" if self.is_wrong else "right"
        return f"{self.fuel} rewrites: {verdict}, {self.worst.what} error {self.worst.error:.1e}"

    def to_dict(self) -> dict[str, Any]:
        worst = self.worst
        return {"rewrites": self.fuel, "wrong": self.is_wrong, "result": worst.what, "error": _finite(worst.error)}


@dataclass
class Bisection:
    """The runs. `right` is the last with right answers before `wrong`, which has one rewrite more."""

    steps: list[Step] = field(default_factory=list)
    right: Step | None = None
    wrong: Step | None = None

    @property
    def guilty(self) -> Rewrite | None:
        return self.wrong.rewrites[-1] if self.right and self.wrong else None

    def __str__(self) -> str:
        if self.wrong is None:
            (step,) = self.steps
            worst = step.worst
            if not step.fuel:
                return f"Nothing was rewritten. {worst} is {worst.share:.2g} of what is allowed."
            return f"Nothing is wrong: with all {step.fuel} rewrites, {worst} is {worst.share:.2g} of what is allowed."
        after = self.wrong.worst
        if self.guilty is None or self.right is None:
            return f"No rewrite is guilty: without any, {after.what} already has error {after.error:.1e}."
        before = self.right.found.get(after.what)
        errors = f"{before.error:.1e} before, " if before else ""
        calls = ", ".join(self.guilty.calls) or "no fused operator"
        return (
            f"Rewrite {self.wrong.fuel} of {self.steps[0].fuel} is the first that changes an answer: {self.guilty}, "
            f"which adds {calls}. {after.what}: error {errors}{after.error:.1e} after, {after.unfused:.1e} in eager "
            f"mode. {VARIABLE}={self.right.fuel} stops before it."
        )

    def to_dict(self) -> dict[str, Any]:
        found = None
        if self.wrong is not None and self.right is not None and self.guilty is not None:
            after = self.wrong.worst
            before = self.right.found.get(after.what)
            found = {
                **asdict(self.guilty), "number": self.wrong.fuel, "result": after.what,
                "before": before and _finite(before.error), "after": _finite(after.error), "eager": after.unfused,
            }  # fmt: skip
        return {"guilty": found, "wrong": self.wrong is not None, "steps": [step.to_dict() for step in self.steps]}


def run_bisect(script: str, target: str, *, as_json: bool = False) -> int:
    """Print the runs and the guilty rewrite; return 1 if an answer is wrong."""
    require("rich")
    tell: Tell = (lambda line: None) if as_json else functools.partial(print, flush=True)
    with progress() as announce, warnings.catch_warnings():
        warnings.simplefilter("ignore", MlaWarning)
        announce(f"building {script}")
        found = bisect(script_call(Path(script)), target, tell, announce)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)
    return int(found.wrong is not None)


def bisect(call: Call, target: str, tell: Tell = lambda line: None, announce: Tell = lambda stage: None) -> Bisection:
    """Compile with all rewrites, with none, and with as many as the last runs leave in question."""
    announce("running in eager mode, and in float64")
    answers = Answers(call)
    try:
        judge, found = answers.judge(), Bisection()
    except Exception as error:
        raise CommandError(f"the program fails in eager mode: {type(error).__name__}: {error}") from error

    def attempt(limit: int) -> Step:
        announce(f"compiling with {'all' if limit == ALL else limit} rewrites")
        step = _attempt(answers, judge, target, limit)
        found.steps.append(step)
        tell(str(step))
        return step

    last = attempt(ALL)
    if not last.is_wrong:
        return found
    found.wrong, first = last, attempt(0)
    if first.is_wrong:
        found.wrong = first
        return found
    found.right = first
    while found.wrong.fuel - found.right.fuel > 1:
        step = attempt((found.wrong.fuel + found.right.fuel) // 2)
        if step.is_wrong:
            found.wrong = step
        else:
            found.right = step
    return found


def _finite(error: float) -> float | None:
    """A number as JSON has it."""
    return error if math.isfinite(error) else None


def _attempt(answers: Answers, judge: Judge, target: str, limit: int) -> Step:
    fuel, failure = Fuel(limit), ""
    torch.compiler.reset()
    try:
        given = answers.of(lambda function: torch.compile(function, backend=limited(fuel, target=target)))
        closeness = judge.of(given)
    except OptionError:
        raise
    except Exception as error:  # a rewrite that makes the program fail is guilty, too
        closeness, failure = {}, f"the run raises {type(error).__name__}: {str(error).splitlines()[0]};"
    finally:
        torch.compiler.reset()
    applied = len(fuel.applied) if limit == ALL else limit
    return Step(applied, closeness, tuple(fuel.applied), failure)
