"""Points at which arithmetic on parts of attention is evaluated.

An evaluation proves a formula on the pieces that its points reach, and on no others. A switch is a number whose sign
decides between two pieces: `x - 2` for `x.clamp(min=2)`. Points lie on both sides of each switch, close to it and away
from it. Logarithms run over many orders of magnitude, and some are equal. A largest score is anything between its
logarithm, where one key has all the weight, and log T below it, where T keys are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

EACH = 24  # points of a scale
FAR = 1e13  # beyond the logarithms of sums
OUTS = (0.0, 1e-3, 1.0, 1.0, 30.0, 1e5, 1e30)  # scales of attention
HALVINGS = 20
STEPS = (0.0, 1e-6, 1e-3, 0.05)  # away from a switch, as shares of the way between two points that it parts


@dataclass(frozen=True)
class Points:
    """`values` [leaves, points]: the attention of each part, logarithms, and free numbers. The last logarithm may be a
    sink, without attention."""

    values: Tensor
    parts: int
    logarithms: int

    @classmethod
    @functools.lru_cache(maxsize=64)
    def drawn(cls, parts: int, logarithms: int, scales: tuple[float, ...], most: tuple[float, ...]) -> Points:
        """Points at random, always the same. Free numbers are 0 to `most`, and often one of the two."""
        draw = torch.Generator().manual_seed(0)
        count = EACH * len(scales)

        def uniform(rows: int) -> Tensor:
            return torch.rand(rows, count, generator=draw, dtype=torch.float64)

        sizes = torch.tensor(OUTS, dtype=torch.float64)[torch.randint(len(OUTS), (count,), generator=draw)]
        outs = torch.randn(parts, count, generator=draw, dtype=torch.float64) * sizes
        lses = (2 * uniform(logarithms) - 1) * torch.tensor(scales, dtype=torch.float64).repeat(EACH)
        shares = (2 * uniform(len(most)) - 0.5).clamp(0, 1) ** 4
        free = shares * torch.tensor(most, dtype=torch.float64).unsqueeze(-1)
        return cls(torch.cat((outs, lses, free)), parts, logarithms)

    def and_where(self, *others: Mapping[str, float]) -> Points:
        """These points and, for each of the others, as many at which the first part has this attention or logarithm."""
        found = [self, *(self.where([0], **other) for other in others)]
        return replace(self, values=torch.cat([one.values for one in found], 1))

    @property
    def outs(self) -> Tensor:
        return self.values[: self.parts]

    @property
    def lses(self) -> Tensor:
        return self.values[self.parts : self.parts + self.logarithms]

    @property
    def shares(self) -> Tensor:
        """The shares of parts and sinks; zero in rows that none sees."""
        return self.lses.softmax(0).nan_to_num(0.0)

    def shared(self, outs: Tensor) -> Tensor:
        """The sum of all parts times their shares."""
        return (outs * self.shares[: self.parts]).sum(0)

    def where(self, parts: Sequence[int], *, out: float | None = None, lse: float | None = None) -> Points:
        """Give some parts this attention and this logarithm, unless they are None."""
        values = self.values.clone()
        if out is not None:
            values[[part for part in parts if part < self.parts]] = out
        if lse is not None:
            values[[self.parts + part for part in parts]] = lse
        return replace(self, values=values)

    def with_sink(self, logit: float) -> Points:
        """The points beside one more logarithm, the same at all of them."""
        before, after = self.values.tensor_split([self.parts + self.logarithms])
        row = self.values.new_full((1, self.values.shape[1]), logit)
        return replace(self, values=torch.cat((before, row, after)), logarithms=self.logarithms + 1)

    def with_outs(self, outs: Tensor) -> Points:
        return replace(self, values=torch.cat((outs, self.values[self.parts :])))

    def with_empty_parts(self) -> Iterator[Points]:
        """The points in rows that one part, all but one, or no part sees."""
        parts = range(self.parts or self.logarithms)
        yield self.where(parts, out=0.0, lse=-torch.inf)
        for part in parts:
            yield self.where([part], out=0.0, lse=-torch.inf)
            yield self.where([other for other in parts if other != part], out=0.0, lse=-torch.inf)

    def beside(self, switches: Callable[[Points], Tensor]) -> Points:
        """These points, and others on both sides of each switch. `switches` computes them, [switches, points]."""
        found = switches(self)
        below, above = (_closest(found, side) for side in (-1, 1))
        parted = (below >= 0) & (above >= 0)
        if not parted.any():
            return self
        which = parted.nonzero().squeeze(-1)
        first, last = (self.values[:, places[which]] for places in (below, above))
        low, high = first, last
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            is_below = switches(replace(self, values=middle))[which].diagonal() < 0
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        near = [one for step in STEPS for one in (low + step * (first - last), high + step * (last - first))]
        least, most = (end.unsqueeze(-1) for end in self.values.aminmax(dim=1))
        return replace(self, values=torch.cat((self.values, torch.cat(near, 1).clamp(least, most)), 1))


def _closest(switches: Tensor, side: int) -> Tensor:
    """The place of the point that is closest to each switch on one side, -1 if there is none."""
    distance = switches * side
    distance = torch.where((distance > 0) & distance.isfinite(), distance, torch.inf)
    return torch.where(distance.isinf().all(1), -1, distance.argmin(1))
