"""How far values are from exact ones, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TIMES = 2
ULPS = 4
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest element
NO_FLOAT64 = {"mps", "npu"}


class Closeness(NamedTuple):
    """One output or written input, and the distance of its compiled and its unfused value from the exact one."""

    what: str
    error: float
    unfused: float
    share: float
    """The error as a share of the allowed one."""

    def __str__(self) -> str:
        return f"{self.what} error {self.error:.1e} (unfused {self.unfused:.1e})"


def wide_dtype(inputs: Iterable[Any]) -> torch.dtype:
    """The dtype of exact values, on the devices of these inputs."""
    devices = {value.device.type for value in inputs if isinstance(value, Tensor)}
    return torch.float32 if devices & NO_FLOAT64 else torch.float64


def closeness(what: str, mine: Any, plain: Any, exact: Any) -> Closeness:
    """How close a value and that of the unfused program are to the exact one. Whatever is equal to begin with, or is no
    tensor, counts as exact."""
    if not isinstance(plain, Tensor) or mine is plain:
        return Closeness(what, 0.0, 0.0, 0.0)
    if not _is_alike(mine, plain):
        return Closeness(what, math.inf, 0.0, math.inf)
    mine, plain, exact = map(numbers, (mine, plain, exact))
    seen = plain.isfinite() & exact.isfinite()
    if not plain.is_floating_point() or not seen.any():
        return Closeness(what, 0.0, 0.0, 0.0)
    floor = floor_of(plain, exact)
    mine, plain, exact = (value.to(exact.dtype)[seen] for value in (mine, plain, exact))
    (error, mean), (unfused, own_mean) = (_errors(value - exact) for value in (mine, plain))
    largest, size = _errors(exact)
    shares = _share(error, TIMES * unfused + floor * largest), _share(mean, TIMES * own_mean + floor * size)
    return Closeness(what, _share(error, largest), _share(unfused, largest), max(shares))


def floor_of(plain: Tensor, exact: Tensor) -> float:
    """The error that is allowed at least, relative to the largest element."""
    return ULPS * torch.finfo(plain.dtype).eps + SAME[exact.dtype]


def distance(mine: Any, theirs: Any) -> float:
    """The distance of two wide values, relative to the largest element."""
    if not isinstance(theirs, Tensor):
        return 0.0
    if not _is_alike(mine, theirs):
        return math.inf
    mine, theirs = numbers(mine), numbers(theirs)
    if not theirs.is_floating_point():
        return 0.0
    seen = theirs.isfinite()
    return _share(_errors((mine - theirs)[seen])[0], _errors(theirs[seen])[0])


def apart(before: Tensor, after: Tensor, close: float) -> str | None:
    """How two tensors differ by more than `close`, relative to the largest element."""
    if before.shape != after.shape:
        return f"its shape would be {list(after.shape)} for {list(before.shape)}"
    if before.numel() == 0:
        return None
    errors = (before.double() - after.double()).abs().flatten()
    worst = int(errors.argmax())
    if bool(errors[worst] <= close * before.double().abs().max()):
        return None
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst, device="cpu"), before.shape)]
    one, other = before.flatten()[worst].item(), after.flatten()[worst].item()
    return f"at {place} it would be {other:.6g} for {one:.6g}"


def _is_alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether both are of the same kind, with equal values wherever they are not finite floating numbers."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    mine, theirs = numbers(mine), numbers(theirs)
    if not theirs.is_floating_point():
        return torch.equal(mine, theirs)
    wild = ~theirs.isfinite() & ~blind(mine, theirs)
    is_same_place = torch.equal(~mine.isfinite(), wild)
    return is_same_place and torch.equal(mine[wild].nan_to_num(0.0), theirs[wild].nan_to_num(0.0))


def blind(mine: Tensor, theirs: Tensor) -> Tensor:
    """Where a row attends to nothing: fused attention gives zeros, a plain softmax NaN."""
    return theirs.isnan() & mine.isfinite()


def numbers(value: Tensor) -> Tensor:
    """A tensor that can be computed with: complex numbers as two, those of 8 bits as wider ones."""
    if value.is_complex():
        return torch.view_as_real(value)
    return value.float() if value.is_floating_point() and value.itemsize == 1 else value


def _errors(difference: Tensor) -> tuple[float, float]:
    """The largest value, and the root mean square."""
    if difference.numel() == 0:
        return 0.0, 0.0
    return float(difference.abs().max()), float(difference.abs().square().mean().sqrt())


def _share(error: float, whole: float) -> float:
    if whole:
        return error / whole
    return math.inf if error else 0.0
