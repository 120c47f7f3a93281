"""The verdict on a mutant: it runs before and after the rewrite, and everything observable is compared."""

from __future__ import annotations

import contextlib
import functools
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from . import excused, outside
from .bench import InvalidError
from .capture import Captured, reals_of
from .compare import compare, corrupted, farther, is_near
from .draw import Mutation, mutate
from .program import Program, Seen, observe, plainly, rounded_once, rounded_otherwise, widened
from .runners import RUNNERS

aten = torch.ops.aten

SECONDS = 10

SAME = ("fused", "unfused")
FAILURES = ("wrong", "refuted", "fallback", "error", "hang")


@dataclass(frozen=True)
class Outcome:
    verdict: str  # one of SAME, FAILURES, or "invalid"
    detail: str = ""
    fused: dict[str, int] = field(default_factory=dict)
    strides_differ: bool = False

    @property
    def is_failure(self) -> bool:
        return self.verdict in FAILURES


class Hang(BaseException):
    """Not an Exception, so that nothing treats it as an ordinary failure."""


@dataclass(frozen=True)
class Expected:
    """What a mutant should give. Each value may be that of any reference."""

    references: list[Seen]
    exact: Program | None = None  # in float64, where the program is in fewer digits
    states: list[Tensor] = field(default_factory=list)  # what it may leave if it raises

    def difference(self, program: Program, found: Seen) -> str:
        """How the rewritten program differs; empty if it does not."""
        eager = self.references[0]
        if eager.error:
            return corrupted(program.inputs, self.states, found) if found.error else f"raises no {eager.error}"
        if self.exact is not None:
            return _farther(program, self.exact, eager, found)
        return compare(self.references, found, has_garbage=program.way.has_garbage)


def _farther(program: Program, exact: Program, eager: Seen, found: Seen) -> str:
    """Where it is farther from float64 than the original graph is, and than float64 itself is with every input rounded
    once more, and than the original graph is if it rounds otherwise: if the last digit decides, all are right. Empty if
    nowhere."""
    seen = plainly(exact)
    difference = farther(seen, eager, found)
    if not difference:
        return ""
    others = filter(functools.partial(is_near, seen), rounded_otherwise(program, exact, seen))
    return difference if all(farther(seen, other, found) for other in chain(rounded_once(exact, eager), others)) else ""


def judge(captured: Captured, mutations: list[Mutation], **options: Any) -> Outcome:
    """`options` are the compiler's."""
    with reals_of(captured.dtype):
        return _judge(captured, mutations, options)


def _judge(captured: Captured, mutations: list[Mutation], options: dict[str, Any]) -> Outcome:
    try:
        program = mutate(captured, mutations)
        expected = _expected(program)
    except InvalidError as error:
        return Outcome("invalid", str(error))
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    try:
        with time_limit(SECONDS):
            outcome = _rewritten(program, expected, options)
    except Hang:
        return Outcome("hang", f"no answer within {SECONDS} seconds of computing")
    if outcome.verdict not in ("wrong", "refuted") or expected.references[0].error:
        return outcome
    excuse = excused.excuse(captured, mutations)
    return Outcome("invalid", excuse) if excuse else outcome


def _expected(program: Program) -> Expected:
    first = plainly(program)
    if first.error:
        return Expected([first], states=outside.states(program))
    _check_meaningful(first.outputs)
    _check_written(program, first)
    if program.is_rounded:
        return Expected([first], widened(program))
    if any(isinstance(value, Tensor) and value.isnan().any() for value in first.outputs):
        references = [first, plainly(program, BLIND_GIVES_ZEROS)]
        return Expected([seen for seen in references if not seen.error])  # a softmax of what is no tensor raises there
    return Expected([first])


def _check_meaningful(expected: tuple[Any, ...]) -> None:
    for value in expected:
        if isinstance(value, Tensor) and value.numel() and not value.is_complex() and not value.isfinite().any():
            raise InvalidError("a result is nowhere finite")


def _difference(left: Tensor, right: Tensor, alpha: float = 1) -> Tensor:
    """Scores and their peak that are both minus infinity differ by minus infinity."""
    result = aten.sub.Tensor(left, right, alpha=alpha)
    if not result.is_floating_point():
        return result
    return torch.where((left == -torch.inf) & (right == -torch.inf), -torch.inf, result)


def _quotient(left: Tensor, right: Tensor) -> Tensor:
    """An exponential and its sum that are both zero have the quotient zero."""
    result = aten.div.Tensor(left, right)
    return torch.where((left == 0) & (right == 0), 0.0, result)


def _reciprocal(total: Tensor) -> Tensor:
    """One over a sum of no exponentials multiplies zeros."""
    return torch.where(total == 0, 0.0, aten.reciprocal.default(total))


# A query that may attend to nothing gives NaN in PyTorch's softmax and zeros in the operators, by their contract. So a
# result is right, too, if it equals that of the same graph with softmaxes that give zeros there.
BLIND_GIVES_ZEROS = {
    aten._softmax.default: lambda logits, dim, _: aten._safe_softmax.default(logits, dim),
    aten.sub.Tensor: _difference,
    aten.div.Tensor: _quotient,
    aten.reciprocal.default: _reciprocal,
}


def _check_written(program: Program, reference: Seen) -> None:
    """Memory that nothing wrote is not a result: filled with NaN, it must not show."""
    if not any("empty" in str(node.target) for node in program.gm.graph.nodes):
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        again = plainly(program)
    finally:
        torch.use_deterministic_algorithms(False)
    if compare([reference], again):
        raise InvalidError("memory that nothing wrote is read")


def _rewritten(program: Program, expected: Expected, options: dict[str, Any]) -> Outcome:
    before = _text(program.gm)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            call, report = RUNNERS[program.way.runner](program, options)
        except Exception as error:
            return Outcome("error", f"the pass raised {type(error).__name__}: {error}")
    right = Outcome("refuted", report.refuted[0]) if report.refuted else None
    failed = [note for note in report.notes if "failed" in note]
    if failed and right is None:
        return Outcome("fallback", failed[0])
    fused = dict(report.fused)
    if not fused:
        same = _text(program.gm) == before
        return right or Outcome("unfused") if same else Outcome("wrong", "nothing fused, yet the graph changed")
    try:
        found = observe(program, call, may_raise=bool(expected.references[0].error))
    except Exception as error:
        return Outcome("error", f"the rewritten graph raised {type(error).__name__}: {error}", fused)
    difference = found.error if found.error and not expected.references[0].error else ""
    difference = difference or expected.difference(program, found)
    if difference:
        return Outcome("wrong", difference, fused)
    return right or Outcome("fused", "", fused, _strides(expected.references[0].outputs) != _strides(found.outputs))


def _text(gm: GraphModule) -> list[Any]:
    return [(node.name, node.target, str(node.args), str(node.kwargs)) for node in gm.graph.nodes]


def _strides(values: tuple[Any, ...]) -> list[Any]:
    return [value.stride() for value in values if isinstance(value, Tensor)]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Count what this process computes, so that other processes do not matter."""

    def expire(*_: Any) -> None:
        raise Hang

    previous = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
