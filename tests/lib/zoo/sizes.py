"""Dimensions, weights, and the steps at which an entry is run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """No two sizes are equal, so a dimension mistaken for another is noticed."""

    hidden: int = 24
    heads: int = 4
    nope: int = 8
    rope: int = 6
    value: int = 10
    q_rank: int = 12
    kv_rank: int = 20
    context: int = 32
    block: int = 16
    epsilon: float = 1e-5

    @property
    def query(self) -> int:
        return self.nope + self.rope


SMALL = Sizes()


@dataclass(frozen=True)
class Step:
    """One call of a layer: `tokens` new tokens for each of `batch` sequences that have `start` tokens already."""

    name: str
    tokens: int
    start: int
    batch: int = 2

    def positions(self, is_ragged: bool = False) -> Tensor:
        """[B or 1, S]; ragged sequences each have their own length."""
        counted = torch.arange(self.start, self.start + self.tokens)
        lead = torch.arange(self.batch) if is_ragged else torch.zeros(1, dtype=torch.int64)
        return lead.unsqueeze(1) + counted


PREFILL, DECODE, FEW = Step("prefill", 9, 0), Step("decode", 1, 6), Step("few", 3, 6)
STEPS = (PREFILL, DECODE, FEW)


def unequal(step: Step) -> Step:
    """The same kind of step with a batch, tokens and a context that are no other size: Dynamo takes equal sizes for one
    symbol."""
    return replace(step, batch=5, start=9 if step.start else 0, tokens={1: 1, 3: 7, 9: 11}[step.tokens])


def dense(*shape: int) -> Tensor:
    """A weight [out, in] that keeps the size of what it multiplies."""
    return torch.randn(shape) / shape[-1] ** 0.5


def gamma(size: int) -> Tensor:
    return 1 + 0.3 * torch.randn(size)


@dataclass(frozen=True)
class Weights:
    """The weights of one layer, [out, in], whatever the modules make of them. Without `q_down` the query is direct."""

    q_down: Tensor | None
    q_gamma: Tensor | None
    q_up: Tensor
    kv_down: Tensor
    kv_gamma: Tensor
    kv_up: Tensor
    out: Tensor


def weights(sizes: Sizes, *, low_rank: bool = True) -> Weights:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Weights(
            q_down=dense(sizes.q_rank, sizes.hidden) if low_rank else None,
            q_gamma=gamma(sizes.q_rank) if low_rank else None,
            q_up=dense(sizes.heads * sizes.query, sizes.q_rank if low_rank else sizes.hidden),
            kv_down=dense(sizes.kv_rank + sizes.rope, sizes.hidden),
            kv_gamma=gamma(sizes.kv_rank),
            kv_up=dense(sizes.heads * (sizes.nope + sizes.value), sizes.kv_rank),
            out=dense(sizes.hidden, sizes.heads * sizes.value),
        )


def hidden_states(sizes: Sizes, step: Step) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(step.batch, step.tokens, sizes.hidden)


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Arguments in another precision; complex numbers keep up with float64."""
    if isinstance(value, tuple):
        return tuple(converted(item, dtype) for item in value)
    if not isinstance(value, Tensor):
        return value
    if value.is_complex():
        return value.to(torch.complex128) if dtype is torch.float64 else value
    return value.to(dtype) if value.is_floating_point() else value.clone()
