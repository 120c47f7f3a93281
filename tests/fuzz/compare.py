"""How one run of a program differs from another, from itself in more digits, or from what an error may leave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .program import Seen

TOLERANCE = 1e-9  # of the largest element, where everything runs in float64
NEAR = 0.03  # of the largest element: if the unfused graph is farther from float64, its result is not compared
TIMES = 2.0  # the fused one may be this many times as far away, plus
ROUNDINGS = 8.0  # of the largest element


def compare(references: list[Seen], found: Seen, *, has_garbage: bool = False) -> str:
    """How the rewritten program differs; empty if it does not. Each value may be that of any reference: an unfused one
    keeps the NaN that a fused one does not have."""
    expected = references[0]
    if len(expected.outputs) != len(found.outputs):
        return f"{len(found.outputs)} outputs instead of {len(expected.outputs)}"
    for number, other in enumerate(found.outputs):
        differences = [_differ(seen.outputs[number], other, has_garbage) for seen in references]
        if all(differences):
            return f"output {number} {differences[0]}"
    for number, other in enumerate(found.left):
        differences = [_differ(seen.left[number], other, False) for seen in references]
        if all(differences):
            return f"input {number} {differences[0]}"
    if _shared(expected) != _shared(found):
        return "outputs share memory with others than before"
    return ""


def _differ(one: Any, other: Any, has_garbage: bool) -> str:
    """With garbage, what is not finite in `one` may be anything in `other`."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if one == other else f"is {other} instead of {one}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"is {other.dtype} {list(other.shape)} instead of {one.dtype} {list(one.shape)}"
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return "" if torch.equal(one, other) else "differs"
    if has_garbage:
        one, other = one[one.isfinite()], other[one.isfinite()]
    if not torch.equal(one.isnan(), other.isnan()) or not torch.equal(one.isinf(), other.isinf()):
        return "is not finite where it was, or the other way around"
    one, other = one.nan_to_num(0, 1, -1).double(), other.nan_to_num(0, 1, -1).double()
    if not one.numel():
        return ""
    error = float((one - other).abs().max() / one.abs().max().clamp(min=1e-3))
    return f"is {error:.2g} off" if error > TOLERANCE else ""


def _shared(seen: Seen) -> list[int]:
    """For each output, the first input or output that shares its memory."""
    places = [
        value.untyped_storage().data_ptr() if isinstance(value, Tensor) and value.numel() else -1 - number
        for number, value in enumerate((*seen.inputs, *seen.outputs))
    ]
    return [places.index(place) for place in places[len(seen.inputs) :]]


# --- against more digits ---------------------------------------------------------------------------------------------


def farther(exact: Seen, eager: Seen, found: Seen) -> str:
    """Where the rewritten program is more than twice as far from float64 as the original, plus a few roundings; empty
    if nowhere. Values that are far off in the original are not compared."""
    if len(eager.outputs) != len(found.outputs):
        return f"{len(found.outputs)} outputs instead of {len(eager.outputs)}"
    outputs = zip(exact.outputs, eager.outputs, found.outputs, strict=True)
    inputs = zip(exact.left, eager.left, found.left, strict=True)
    for kind, values in (("output", outputs), ("input", inputs)):
        for number, value in enumerate(values):
            difference = _farther(*value)
            if difference:
                return f"{kind} {number} {difference}"
    return ""


def is_near(exact: Seen, found: Seen) -> bool:
    """Says if results are finite where those in float64 are, and off by a few digits at most."""
    return all(map(_is_near, (*exact.outputs, *exact.left), (*found.outputs, *found.left)))


def _is_near(exact: Any, found: Any) -> bool:
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return True
    finite = exact.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return False
    exact, found = exact[finite].double(), found[finite].double()
    return not exact.numel() or bool((found - exact).abs().max() <= NEAR * exact.abs().max())


def _farther(exact: Any, eager: Any, found: Any) -> str:
    if not isinstance(eager, Tensor) or not eager.is_floating_point():
        return _differ(eager, found, False)
    if (eager.shape, eager.dtype) != (found.shape, found.dtype):
        return f"is {found.dtype} {list(found.shape)} instead of {eager.dtype} {list(eager.shape)}"
    compared = eager.isfinite() & exact.isfinite()
    if not compared.any():
        return ""
    limits = torch.finfo(eager.dtype)
    exact, eager, found = (value[compared].double() for value in (exact, eager, found))
    largest = float(exact.abs().max())
    theirs = float((eager - exact).abs().max())
    if theirs > NEAR * largest:
        return ""
    if not found.isfinite().all():
        return "is not finite where it was"
    ours = float((found - exact).abs().max())
    if ours <= TIMES * theirs + ROUNDINGS * limits.eps * largest + limits.tiny:
        return ""
    if largest == 0:
        return f"is {ours:.2g} where it was zero"
    return f"is {ours / largest:.2g} off where it was {theirs / largest:.2g}"


# --- after an error --------------------------------------------------------------------------------------------------


def corrupted(before: tuple[Any, ...], states: list[Tensor], found: Seen) -> str:
    """The input that holds, after an error, something that the program never wrote there; empty if none does."""
    for number, (old, new) in enumerate(zip(before, found.inputs, strict=True)):
        if not isinstance(old, Tensor):
            continue
        new = new.flatten()
        allowed = torch.isclose(old.flatten(), new, rtol=0, atol=0, equal_nan=True)
        for state in (state.flatten() for state in states):
            if state.numel() == new.numel() and state.dtype == new.dtype:
                allowed |= torch.isclose(state, new, rtol=1e-3, atol=_room(old.flatten(), state), equal_nan=True)
        if not allowed.all():
            return f"input {number} was written where the program raises"
    return ""


def _room(old: Tensor, state: Tensor) -> float:
    """A few roundings of the largest number that was written."""
    if not state.is_floating_point():
        return 0.0
    written = state[(state != old) & state.isfinite()]
    return ROUNDINGS * torch.finfo(state.dtype).eps * float(written.abs().max()) if written.numel() else 0.0
