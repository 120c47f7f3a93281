"""Finds the first rewrite that makes a program's answer wrong. The answer is what the program returns and leaves in its
arguments, run by run; each run gets its own copies."""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_fx.backend import limited
from mla_fx.commands import CommandError
from mla_fx.comparing.closeness import Closeness, closeness, distance, wide_dtype
from mla_fx.comparing.exact import FLOATS, in_copies, widened
from mla_fx.debug import require
from mla_fx.errors import MlaWarning, OptionError
from mla_fx.passes.fuel import VARIABLE, Fuel, Rewrite

from .demo import progress
from .models import Program, script_call

Tell = Callable[[str], None]
ALL = sys.maxsize  # a limit, too, so that no cache answers
Found = Mapping[str, Tensor]

# Relative to the largest element, where the program does not run in float64 and eager mode has to do for exact.
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
HIDDEN = ("_parameters", "_buffers", "_modules")  # of a module: members whose path is that of the module


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


def bisect(
    call: Program, target: str, tell: Tell = lambda line: None, announce: Tell = lambda stage: None
) -> Bisection:
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


@dataclass(frozen=True)
class Answers:
    """Runs a program: a callable, its arguments and its keyword arguments, which stay as they are."""

    call: Program

    def of(self, compiled: Callable[..., Any] = lambda function: function) -> Found:
        """The tensors that a run returns, and those that are in its arguments or its module afterwards, by name."""
        return _run(copy.deepcopy(self.call), compiled)

    def judge(self) -> Judge:
        plain = self.of()
        try:
            return Judge(plain, self._exact())
        except Exception:  # such as a cast to 16 bits in the program
            return Judge(plain, None)

    def _exact(self) -> Found:
        tensors = dict(_tensors(self.call, ""))
        dtype = wide_dtype(tensors.values())
        narrow = [value for value in tensors.values() if value.dtype in FLOATS or value.is_complex()]
        copies = in_copies(narrow, narrow, partial(widened, dtype))
        memo: dict[int, Any] = dict(zip(map(id, narrow), copies, strict=True))
        wide = _run(copy.deepcopy(self.call, memo), lambda function: function)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in wide.items()}


@dataclass(frozen=True)
class Judge:
    """What eager mode computes, in the program's precision and exactly; without the exact values, it counts as
    exact itself."""

    plain: Found
    exact: Found | None

    def of(self, given: Found) -> dict[str, Closeness]:
        if given.keys() != self.plain.keys():
            raise ValueError(f"the run has other results: {', '.join(sorted(given.keys() ^ self.plain.keys()))}")
        return {name: self._one(name, value) for name, value in given.items()}

    def _one(self, name: str, value: Tensor) -> Closeness:
        plain = self.plain[name]
        if self.exact is None:
            error = distance(value, plain)
            return Closeness(name, error, 0.0, error / ALLOWED.get(plain.dtype, ALLOWED[torch.float32]))
        exact = self.exact[name]
        if not plain.is_floating_point() and not plain.is_complex() and not torch.equal(plain, exact):
            return Closeness(name, 0.0, 0.0, 0.0)  # rounding decides
        return closeness(name, value, plain, exact)


def _run(call: Program, compiled: Callable[..., Any]) -> Found:
    function, args, kwargs = call
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = compiled(function)(*args, **kwargs)
    arguments = [(f"argument {name}", value) for name, value in (*enumerate(args), *kwargs.items())]
    seen: set[int] = set()
    left = [found for name, value in (*arguments, ("", function)) for found in _tensors(value, name, seen)]
    return {path: value.detach() for path, value in (*left, *_tensors(outputs, "output"))}


def _tensors(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a value and their paths, each once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path or "the tensor", value
        return
    for name, member in _members(value):
        yield from _tensors(member, f"{path}{name}".strip("."), seen)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f".{name}" if isinstance(name, str) else f"[{name!r}]", member) for name, member in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", member) for place, member in enumerate(value))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, FunctionType)):
        yield from (("" if name in HIDDEN else f".{name}", member) for name, member in vars(value).items())
