"""What becomes of a mutant: it is run before and after the rewrite, and everything that can be seen is compared."""

from __future__ import annotations

import contextlib
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

import mla_fx

from .bench import InvalidError
from .capture import Captured, copies, float64_by_default, run
from .draw import Mutation, mutate

aten = torch.ops.aten

TOLERANCE = 1e-9  # of the largest element; everything runs in float64
SECONDS = 20

SAME = ("fused", "unfused")
FAILURES = ("wrong", "fallback", "error", "hang")


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
    """No Exception, so that nothing on the way takes it for an ordinary failure."""


@float64_by_default()
def judge(captured: Captured, mutations: list[Mutation]) -> Outcome:
    try:
        gm = mutate(captured, mutations)
        references = [_run(gm, captured)]
        _check_meaningful(references[0][0])
        _check_written(gm, captured, references[0])
        if any(isinstance(value, Tensor) and value.isnan().any() for value in references[0][0]):
            references.append(_run(gm, captured, BLIND_GIVES_ZEROS))
    except InvalidError as error:
        return Outcome("invalid", str(error))
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    try:
        with time_limit(SECONDS):
            outcome = _rewritten(gm, captured, references)
    except Hang:
        return Outcome("hang", f"no answer within {SECONDS} seconds")
    if outcome.verdict == "wrong" and _leaves_the_numbers(captured, mutations):
        return Outcome("invalid", "what is computed with is no number")
    return outcome


def _check_meaningful(expected: tuple[Any, ...]) -> None:
    for value in expected:
        if isinstance(value, Tensor) and value.numel() and not value.is_complex() and not value.isfinite().any():
            raise InvalidError("a result is nowhere finite")


def _difference(left: Tensor, right: Tensor, alpha: float = 1) -> Tensor:
    """That of scores to their peak, where both are minus infinity: minus infinity."""
    result = aten.sub.Tensor(left, right, alpha=alpha)
    return torch.where((left == -torch.inf) & (right == -torch.inf), -torch.inf, result)


def _quotient(left: Tensor, right: Tensor) -> Tensor:
    """That of an exponential and its sum, where both are zero: zero."""
    result = aten.div.Tensor(left, right)
    return torch.where((left == 0) & (right == 0), 0.0, result)


# A query that may attend to nothing gives NaN in PyTorch's softmax and zeros in the operators, which is their contract.
# So a result is right, too, if it is just that of the same graph with softmaxes that give zeros there.
BLIND_GIVES_ZEROS = {
    aten._softmax.default: lambda logits, dim, _: aten._safe_softmax.default(logits, dim),
    aten.sub.Tensor: _difference,
    aten.div.Tensor: _quotient,
}

OWN_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default

# A softmax, written as one or by hand, may make NaN of a row that sees nothing; that is judged.
MAY_BLIND = frozenset({aten._softmax.default, aten._safe_softmax.default, aten.sub.Tensor, aten.div.Tensor})


class _Numbers(torch.fx.Interpreter):
    """Runs a graph, and refuses one that multiplies infinities or makes NaN of numbers: what becomes of these hangs on
    the order of additions, and on kernels. So does what PyTorch's own attention for CPUs, called by its name, reads of
    columns that do not lie one behind another."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        given = [value for value in args if isinstance(value, Tensor)]
        if target is OWN_ATTENTION and any(value.stride(-1) != 1 for value in given):
            raise InvalidError("PyTorch's own attention reads other columns than it is given")
        result = super().call_function(target, args, kwargs)
        is_product = target in (aten.mm.default, aten.bmm.default)
        makes_nan = isinstance(result, Tensor) and result.isnan().any() and not any(v.isnan().any() for v in given)
        if (is_product and any(value.isinf().any() for value in given)) or (makes_nan and target not in MAY_BLIND):
            raise InvalidError("what is computed with is no number")
        return result


def _leaves_the_numbers(captured: Captured, mutations: list[Mutation]) -> bool:
    try:
        with torch.no_grad():
            _Numbers(mutate(captured, mutations)).run(*copies(captured.inputs))
    except InvalidError:
        return True
    return False


def _check_written(gm: GraphModule, captured: Captured, reference: Any) -> None:
    """What is read from memory that nothing wrote is no answer: filled with NaN, it must not show."""
    if not any("empty" in str(node.target) for node in gm.graph.nodes):
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        again = _run(gm, captured)
    finally:
        torch.use_deterministic_algorithms(False)
    if compare([reference], *again):
        raise InvalidError("memory that nothing wrote is read")


def _run(gm: GraphModule, captured: Captured, instead: Any = None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What a graph gives, and what it leaves of its inputs."""
    inputs = copies(captured.inputs)
    with torch.no_grad():
        return run(gm, inputs, instead), inputs


def _rewritten(gm: GraphModule, captured: Captured, references: list[Any]) -> Outcome:
    compiler = mla_fx.MlaPass(target="reference")
    before = _text(gm)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            compiler(gm)
        except Exception as error:
            return Outcome("error", f"the pass raised {type(error).__name__}: {error}")
    failed = [note for note in compiler.report.notes if "failed" in note]
    if failed:
        return Outcome("fallback", failed[0])
    fused = dict(compiler.report.fused)
    if not fused:
        return Outcome("unfused") if _text(gm) == before else Outcome("wrong", "nothing fused, yet the graph changed")
    try:
        found, ours = _run(gm, captured)
    except Exception as error:
        return Outcome("error", f"the rewritten graph raised {type(error).__name__}: {error}", fused)
    difference = compare(references, found, ours)
    if difference:
        return Outcome("wrong", difference, fused)
    return Outcome("fused", "", fused, _strides(references[0][0]) != _strides(found))


def _text(gm: GraphModule) -> list[Any]:
    return [(node.name, node.target, str(node.args), str(node.kwargs)) for node in gm.graph.nodes]


def _strides(values: tuple[Any, ...]) -> list[Any]:
    return [value.stride() for value in values if isinstance(value, Tensor)]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise Hang

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


# --- what is compared ------------------------------------------------------------------------------------------------


def compare(references: list[Any], found: Any, ours: Any) -> str:
    """In what the rewritten program differs; empty if in nothing. Each value may be that of any reference: one that is
    not fused keeps the NaN that a fused one has not."""
    (expected, theirs), *_ = references
    if len(expected) != len(found):
        return f"{len(found)} outputs instead of {len(expected)}"
    for kind, side, others in (("output", 0, found), ("input", 1, ours)):
        for number, other in enumerate(others):
            differences = [_differ(reference[side][number], other) for reference in references]
            if all(differences):
                return f"{kind} {number} {differences[0]}"
    if _shared(expected, theirs) != _shared(found, ours):
        return "outputs share memory with others than before"
    return ""


def _differ(one: Any, other: Any) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if one == other else f"is {other} instead of {one}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return "" if torch.equal(one, other) else "differs"
    if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(one.isinf(), other.isinf()):
        return "is not finite where it was, or the other way around"
    one, other = one.nan_to_num(0, 1, -1).double(), other.nan_to_num(0, 1, -1).double()
    if not one.numel():
        return ""
    error = float((one - other).abs().max() / one.abs().max().clamp(min=1e-3))
    return f"is {error:.2g} off" if error > TOLERANCE else ""


def _shared(outputs: Any, inputs: Any) -> list[int]:
    """For each output the first input or output that lies in the same memory."""
    places = [
        value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.numel() else -1 - number
        for number, value in enumerate((*inputs, *outputs))
    ]
    return [places.index(place) for place in places[len(inputs) :]]
