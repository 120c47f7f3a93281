"""How far a result may be from the exact one because of choices that rounding flips."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .closeness import TIMES, Closeness, blind, floor_of, numbers

FLIPS = 1.5  # times what flips change in a draw: all of them rarely flip at once
UNSEEN = 1 / 8  # of a row may be further away than in any draw, but than the largest of the row
CODES = (torch.int8, torch.uint8)  # numbers; wider whole numbers are names, as those of experts


class Envelope:
    """A value, that of the unfused program and the exact one, and what draws of other choices make of it.

    Beside what rounding may do, no number may be further away than the largest of its row in the draws, `FLIPS` times,
    and few further than itself in the draws. So one wrong choice shows beside another that may flip: it moves other
    numbers. A name or a flag must be that of a draw."""

    def __init__(self, what: str, mine: Tensor, plain: Tensor, exact: Tensor) -> None:
        """`mine` is copied, since it may be an input, which the draws find as it was before."""
        self.what = what
        self.is_alike = mine.shape == exact.shape and mine.dtype == plain.dtype
        self.are_numbers = exact.is_floating_point() or exact.is_complex() or exact.dtype in CODES
        self.mine, self.plain, self.exact = map(numbers, (mine.clone(), plain, exact))
        self.spread = torch.zeros_like(self.exact, dtype=torch.float32)
        self.seen = self.exact == self.mine if self.is_alike else torch.zeros(0)

    def widen(self, draw: Tensor) -> None:
        """Take in what a draw returns."""
        draw = numbers(draw)
        if not self.is_alike or draw.shape != self.exact.shape:
            return
        if self.are_numbers:
            self.spread = torch.maximum(self.spread, _gap(draw, self.exact).to(self.spread))
        else:
            self.seen |= draw == self.mine

    @property
    def closeness(self) -> Closeness:
        if not self.is_alike or not self.are_numbers:
            error = 0.0 if self.is_alike and self.seen.all() else math.inf
            return Closeness(self.what, error, 0.0, error)
        gaps, own = _gap(self.mine, self.exact), _gap(self.plain, self.exact)
        unfused = float(own.nan_to_num(0, posinf=0).max())
        largest = float(self.exact.nan_to_num(0, 0, 0).abs().max()) or 1.0
        floor = floor_of(self.plain, self.exact) if self.plain.is_floating_point() else 0.0
        rounding, spread = TIMES * unfused + floor * largest, self.spread.reshape(self.spread.shape or (1,))
        limits = FLIPS * spread.amax(-1, keepdim=True) + rounding
        shares = torch.where(gaps <= limits, (gaps / limits).nan_to_num(0), gaps / limits)
        unseen = (gaps > FLIPS * spread + rounding).double().mean(-1) / max(UNSEEN, 1 / spread.shape[-1])
        share = max(float(shares.max()), float(unseen.max()))
        return Closeness(self.what, float(gaps.max()) / largest, unfused / largest, share)


def _gap(one: Tensor, other: Tensor) -> Tensor:
    """The distance of each element; infinite where only one is finite, but for rows that attend to nothing."""
    wide = other.dtype if other.is_floating_point() else torch.float32
    gap = (one.to(wide) - other.to(wide)).abs().nan_to_num(math.inf)
    return gap.masked_fill((one == other) | (one.isnan() & other.isnan()) | blind(one, other), 0.0)
