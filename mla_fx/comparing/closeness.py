"""How far values are from exact ones, and how far they may be, also because of choices that rounding flips."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .inputs import INTEGER_CODES

TIMES = 2
ULPS = 4
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the largest element
NO_FLOAT64 = {"mps", "npu"}
# Measured where up to 16 codes or 3 pairs of keys are open and any of them flip: at most 1.33, and 0.05 of a row.
FLIPS = 1.5  # times what flips change in a draw: all of them rarely flip at once
UNSEEN = 1 / 8  # of a row may be further away than in any draw, but than the largest of the row


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


class Envelope:
    """A value, that of the unfused program and the exact one, and what draws of other choices make of it.

    A row of numbers is right if, but for rounding, it is that of a draw. Few choices make few rows: if each was drawn
    twice or more, there is no other. Else, no number may be further away than the largest of its row in the draws,
    `FLIPS` times, and few further than itself in the draws. So one wrong choice shows beside another that may flip: it
    moves other numbers. A name or a flag must be that of a draw."""

    def __init__(self, what: str, mine: Tensor, plain: Tensor, exact: Tensor) -> None:
        self.what = what
        self.is_alike = mine.shape == exact.shape and mine.dtype == plain.dtype
        self.are_numbers = exact.is_floating_point() or exact.is_complex() or exact.dtype in INTEGER_CODES
        self.mine, plain, self.exact = (_rows(numbers(value)) for value in (mine, plain, exact))
        self.seen = self.exact == self.mine if self.is_alike else torch.zeros(0)
        if not self.is_alike or not self.are_numbers:
            return
        self.unfused = float(_gap(plain, self.exact).nan_to_num(0, posinf=0).max())
        self.largest = float(self.exact.nan_to_num(0, 0, 0).abs().max()) or 1.0
        floor = floor_of(plain, self.exact) if plain.is_floating_point() else 0.0
        self.rounding = TIMES * self.unfused + floor * self.largest
        self.spread = torch.zeros_like(self.exact, dtype=torch.float32)
        self.nearest = _gap(self.mine, self.exact).amax(-1, keepdim=True)
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.rand(self.exact.shape[-1], generator=generator).to(self.spread)
        self.sums = [self._sums(self.exact)]

    def widen(self, draw: Tensor) -> None:
        """Take in what a draw returns."""
        draw = _rows(numbers(draw))
        if not self.is_alike or draw.shape != self.exact.shape:
            return
        if not self.are_numbers:
            self.seen |= draw == self.mine
            return
        self.spread = torch.maximum(self.spread, _gap(draw, self.exact).to(self.spread))
        self.nearest = torch.minimum(self.nearest, _gap(self.mine, draw).amax(-1, keepdim=True))
        self.sums.append(self._sums(draw))

    def _sums(self, draw: Tensor) -> Tensor:
        """Numbers that differ where rows do."""
        wide = draw.to(self.exact.dtype if self.exact.is_floating_point() else torch.float32)
        return (wide.nan_to_num(0, 0, 0) * self.weights).sum(-1, keepdim=True)

    @property
    def is_drawn(self) -> bool:
        """Whether a draw of each row is what the value is, so that no more draws are needed."""
        if not self.is_alike or not self.are_numbers:
            return not self.is_alike or bool(self.seen.all())
        return bool((self.nearest <= self.rounding).all())

    @property
    def closeness(self) -> Closeness:
        if not self.is_alike or not self.are_numbers:
            error = 0.0 if self.is_alike and self.seen.all() else math.inf
            return Closeness(self.what, error, 0.0, error)
        gaps, rounding = _gap(self.mine, self.exact), self.rounding
        limits = FLIPS * self.spread.amax(-1, keepdim=True) + rounding
        unseen = (gaps > FLIPS * self.spread + rounding).double().mean(-1, keepdim=True)
        near = torch.maximum(_shares(gaps, limits).amax(-1, keepdim=True), unseen / max(UNSEEN, 1 / gaps.shape[-1]))
        drawn = _shares(self.nearest, torch.full_like(self.nearest, rounding))
        shares = torch.where((drawn <= 1) | _are_few(torch.stack(self.sums)), drawn.to(near), near)
        return Closeness(self.what, float(gaps.max()) / self.largest, self.unfused / self.largest, float(shares.max()))


def _rows(value: Tensor) -> Tensor:
    return value.reshape(value.shape or (1,))


def _shares(gaps: Tensor, limits: Tensor) -> Tensor:
    return torch.where(gaps <= limits, (gaps / limits).nan_to_num(0), gaps / limits)


def _are_few(drawn: Tensor) -> Tensor:
    """Whether each of the numbers drawn was drawn twice or more, beside the first."""
    order = drawn[1:].sort(dim=0).values
    apart = order.diff(dim=0) != 0
    ends = torch.ones_like(order[:1], dtype=torch.bool)
    return ~(torch.cat((ends, apart)) & torch.cat((apart, ends))).any(0)


def _gap(one: Tensor, other: Tensor) -> Tensor:
    """The distance of each element; infinite where only one is finite, but for rows that attend to nothing."""
    wide = other.dtype if other.is_floating_point() else torch.float32
    gap = (one.to(wide) - other.to(wide)).abs().nan_to_num(math.inf)
    return gap.masked_fill((one == other) | (one.isnan() & other.isnan()) | blind(one, other), 0.0)
