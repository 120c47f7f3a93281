"""How far a result may be from the exact one because of choices that rounding flips."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .closeness import TIMES, Closeness, blind, floor_of, numbers
from .inputs import CODES

# Measured where up to 16 codes or 3 pairs of keys are open and any of them flip: at most 1.33, and 0.05 of a row.
FLIPS = 1.5  # times what flips change in a draw: all of them rarely flip at once
UNSEEN = 1 / 8  # of a row may be further away than in any draw, but than the largest of the row


class Envelope:
    """A value, that of the unfused program and the exact one, and what draws of other choices make of it.

    A row of numbers is right if, but for rounding, it is that of a draw. Few choices make few rows: if each was drawn
    twice or more, there is no other. Else, no number may be further away than the largest of its row in the draws,
    `FLIPS` times, and few further than itself in the draws. So one wrong choice shows beside another that may flip: it
    moves other numbers. A name or a flag must be that of a draw."""

    def __init__(self, what: str, mine: Tensor, plain: Tensor, exact: Tensor) -> None:
        self.what = what
        self.is_alike = mine.shape == exact.shape and mine.dtype == plain.dtype
        self.are_numbers = exact.is_floating_point() or exact.is_complex() or exact.dtype in CODES
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
        near = torch.maximum(_share(gaps, limits).amax(-1, keepdim=True), unseen / max(UNSEEN, 1 / gaps.shape[-1]))
        drawn = _share(self.nearest, torch.full_like(self.nearest, rounding))
        shares = torch.where((drawn <= 1) | _are_few(torch.stack(self.sums)), drawn.to(near), near)
        return Closeness(self.what, float(gaps.max()) / self.largest, self.unfused / self.largest, float(shares.max()))


def _rows(value: Tensor) -> Tensor:
    return value.reshape(value.shape or (1,))


def _share(gaps: Tensor, limits: Tensor) -> Tensor:
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
