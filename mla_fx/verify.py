"""Running the unfused graph beside the fused one, and comparing outputs and mutated inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .errors import VerificationError

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def verified(compiled: Callable[..., Any], original: Callable[..., Any], *, once: bool) -> Callable[..., Any]:
    """`compiled`, with its results held against `original` on every call, or on the first call only.

    Tensors that are no parameters are copied for the unfused run, which may write into them."""
    done = False

    def checked(*inputs: Any) -> Any:
        nonlocal done
        if done:
            return compiled(*inputs)
        copies = [_copied(value) for value in inputs]
        expected = original(*copies)
        got = compiled(*inputs)
        _compare("output", tree_leaves(got), tree_leaves(expected))
        _compare("input", inputs, copies)
        done = once
        return got

    return checked


def _copied(value: Any) -> Any:
    is_written = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
    return value.clone() if is_written else value


def _compare(kind: str, got: Sequence[Any], expected: Sequence[Any]) -> None:
    for position, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(theirs, Tensor) or mine is theirs:
            continue
        error = _relative_error(mine, theirs)
        allowed = TOLERANCE.get(theirs.dtype, 0.0)
        if not error <= allowed:
            raise VerificationError(
                f"{kind} {position} of the fused graph is {error:.3g} away from the unfused one, relative to its "
                f"largest element; {allowed:.3g} is allowed for {theirs.dtype}"
            )


def _relative_error(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return float("inf")
    if mine.numel() == 0 or torch.equal(mine, theirs):
        return 0.0
    if not theirs.is_floating_point():
        return float("inf")
    mine, theirs = mine.double(), theirs.double()
    if not torch.equal(mine.isfinite(), theirs.isfinite()):
        return float("inf")
    mine, theirs = mine.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))
