"""Attention to two parts of a context, merged by the logarithms of their sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .heads import Absorbed
from .plain import Sizes

Part = tuple[Tensor, Tensor]  # attention and, with one column, the logarithms


class Halves(Absorbed):
    def some(self) -> tuple[slice, slice]:
        half = self.sizes.context // 2
        return slice(0, half), slice(half, None)

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        one, other = (self.part(query, key[:, :, own], latent[:, :, own], mask[:, own]) for own in self.some())
        return self.merged(one, other)

    def part(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Part:
        scores = query @ key.mT * 0.4 + mask
        return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True)

    def merged(self, one: Part, other: Part) -> Tensor:
        outs, lses = (torch.stack(values) for values in zip(one, other, strict=True))
        return (outs * lses.softmax(0)).sum(0)


class Shards(Halves):
    """Every second row, divided late, as flash attention does it; merged by the larger logarithm."""

    def some(self) -> tuple[slice, slice]:
        return slice(0, None, 2), slice(1, None, 2)

    def part(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Part:
        scores = query @ key.mT * 0.4 + mask
        largest = scores.amax(-1, keepdim=True)
        raised = (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
        total = raised.sum(-1, keepdim=True)
        return raised @ value / total.clamp(min=1e-30), largest + total.log()

    def merged(self, one: Part, other: Part) -> Tensor:
        largest = torch.maximum(one[1], other[1])
        shares = [(lse - largest).exp() for _, lse in (one, other)]
        return (one[0] * shares[0] + other[0] * shares[1]) / (shares[0] + shares[1])


class NewTokens(Shards):
    """The rows before the new tokens, and those of the new tokens."""

    def some(self) -> tuple[slice, slice]:
        start = self.sizes.start
        return slice(0, start), slice(start, start + self.sizes.tokens)


class Tail(Shards):
    """The second part has no key that the first token sees."""

    def some(self) -> tuple[slice, slice]:
        end = self.sizes.start + 1
        return slice(0, end), slice(end, None)

    def merged(self, one: Part, other: Part) -> Tensor:
        joined = torch.logaddexp(one[1], other[1])
        shares = [torch.where(lse == -torch.inf, 0.0, (lse - joined).exp()) for _, lse in (one, other)]
        outs = [torch.where(share == 0, 0.0, out * share) for (out, _), share in zip((one, other), shares, strict=True)]
        return outs[0] + outs[1]


class ExpandedHalves(Halves):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        return self.over_latents(torch.cat((q_nope, q_rope), dim=-1), *self.expanded(latent, k_rope), mask)


class ExpandedTail(ExpandedHalves, Tail):
    pass


class RunningSums(Halves):
    """Flash attention's loop: sums shrink where the largest score grows."""

    def start(self, zeros: Tensor) -> Part:
        """The sum and the largest score before the first part."""
        return zeros, zeros - torch.inf

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        total, largest = self.start(torch.zeros(*query.shape[:-1], 1, dtype=query.dtype))
        out = torch.zeros(*query.shape[:-1], latent.shape[-1], dtype=query.dtype)
        for own in self.some():
            scores = query @ key[:, :, own].mT * 0.4 + mask[:, own]
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - new).exp(), (largest - new).exp()
            out, total = out * shrink + weights @ latent[:, :, own], total * shrink + weights.sum(-1, keepdim=True)
            largest = new
        return out / total


class SumsFromSink(RunningSums):
    """The exponential of the sink, less itself, is in the sum from the start."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.sinks = self.gamma(sizes.heads)

    def start(self, zeros: Tensor) -> Part:
        return zeros + 1, self.sinks.view(-1, 1, 1).expand_as(zeros)


class SumsApart(Tail):
    """Each part has its own largest score; sums are added at the end."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        found = []
        for own in self.some():
            scores = query @ key[:, :, own].mT * 0.4 + mask[:, own]
            largest = scores.max(-1, keepdim=True).values
            weights = (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
            found.append((weights @ latent[:, :, own], weights.sum(-1, keepdim=True), largest))
        outs, totals, largest = (torch.stack(values) for values in zip(*found, strict=True))
        shares = (largest - largest.amax(0)).exp()
        return (outs * shares).sum(0) / (totals * shares).sum(0)


class GuardedSums(SumsApart):
    """Rows that see no key are zero: their sum is bounded from below."""

    least = 1e-20

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        outs, totals, peaks = [], [], []
        for own in self.some():
            scores = query @ key[:, :, own].mT * 0.4 + mask[:, own]
            largest = scores.amax(-1, keepdim=True)
            weights = (scores - torch.where(largest == -torch.inf, 0.0, largest)).exp()
            outs.append(weights @ latent[:, :, own])
            totals.append(weights.sum(-1, keepdim=True))
            peaks.append(largest)
        peak = torch.maximum(*peaks)
        shares = [(one - torch.where(peak == -torch.inf, 0.0, peak)).exp() for one in peaks]
        total = totals[0] * shares[0] + totals[1] * shares[1]
        return (outs[0] * shares[0] + outs[1] * shares[1]) / total.clamp(min=self.least)


class BoundedSums(GuardedSums):
    """A bound that rows with one key that has nearly all the weight pass."""

    least = 1.05


class BoundedParts(Halves):
    def merged(self, one: Part, other: Part) -> Tensor:
        return super().merged(one, other).clamp(-8, 8)


class ExpandedSums(ExpandedHalves, RunningSums):
    pass
