"""Indexers: a top-k of their scores chooses the keys of each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .masks import Sink
from .plain import Layer, Sizes

HEADS, WIDTH, CHOSEN = 6, 8, 3
LOWEST = torch.finfo(torch.float64).min


class Indexed(Layer):
    """DeepSeek V3.2: the indexer has its own rotation and its own cache."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.index_q, self.index_k = self.weight(HEADS * WIDTH, sizes.q_rank), self.weight(WIDTH, sizes.hidden)
        self.index_w = self.weight(HEADS, sizes.hidden)

    def caches(self) -> tuple[Tensor, ...]:
        return *super().caches(), self.random(self.sizes.batch, self.sizes.context, WIDTH)

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        *latents, index_keys = caches
        compressed = self.norm(self.compressed(x), self.q_gamma)
        query = (compressed @ self.index_q.T).unflatten(-1, (HEADS, WIDTH))
        index_keys.index_copy_(1, place, self.turned(x @ self.index_k.T, *tables))
        query = self.turned(query.transpose(1, 2), *tables).transpose(1, 2)
        mask = self.chosen(self.scores(query, index_keys, x @ self.index_w.T), mask)
        return super().forward(x, tables, place, mask, tuple(latents))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the first columns, as halves."""
        width = self.sizes.rope
        return torch.cat((self.rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """[B, S, T]."""
        products = torch.relu(query @ keys.mT.unsqueeze(1) * 0.3)
        return ((weights * 0.4).unsqueeze(-2) @ products).squeeze(-2)

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = (scores + mask).topk(CHOSEN, dim=-1).indices
        hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, indices, False)
        return mask.masked_fill(hidden, -torch.inf).unsqueeze(1)


class Threshold(Indexed):
    """Keys whose scores are below the last chosen one are hidden."""

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        wishes = scores + mask
        hidden = wishes < wishes.topk(CHOSEN, dim=-1).values[..., -1:]
        return mask.masked_fill(hidden, -torch.inf).unsqueeze(1)


class IndexedByHeads(Indexed):
    """Sums of products, and minus infinity in a mask of numbers. The last columns rotate."""

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = self.sizes.rope
        return torch.cat((x[..., width:], self.rotate(x[..., :width], cos, sin)), dim=-1)

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        products = torch.einsum("bshd,btd->bhst", query, keys).clamp(min=0)
        return (products * weights.mT.unsqueeze(-1)).sum(1)

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = (scores + mask).topk(CHOSEN, dim=-1).indices
        return (torch.full_like(scores, -torch.inf).scatter(-1, indices, 0.0) + mask).unsqueeze(1)


class ScaledKeys(IndexedByHeads):
    """DeepSeek's own code: the scales of coded keys multiply the scores. Here they have both signs."""

    def scores(self, query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return super().scores(query, keys, weights) * keys.sin().sum(-1).unsqueeze(1)


class IndexedByCondition(Indexed):
    """All masks are conditions."""

    def mask(self) -> Tensor:
        return self.allowed()

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = scores.masked_fill(~mask, -torch.inf).topk(CHOSEN, dim=-1).indices
        return (torch.zeros_like(scores, dtype=torch.bool).scatter(-1, indices, True) & mask).unsqueeze(1)

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.masked_fill(~mask, -torch.inf).softmax(-1)


class Counted(IndexedByCondition):
    """Numbers are counted. Those with no positive score are -1."""

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        found = scores.masked_fill(~mask, -torch.inf).topk(CHOSEN, dim=-1)
        indices = found.indices.masked_fill(found.values <= 0, -1)
        counts = torch.zeros_like(scores, dtype=torch.int32)
        counts = counts.scatter_add(-1, indices.clamp(0, scores.shape[-1] - 1), (indices >= 0).int())
        return (counts.ne(0) & mask).unsqueeze(1)


class OneHot(IndexedByCondition):
    """Sums of flags, one for each number of a key."""

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = scores.masked_fill(~mask, -torch.inf).topk(CHOSEN, dim=-1).indices
        return ((one_hot(indices, scores.shape[-1]).sum(-2) > 0) & mask).unsqueeze(1)


class ChosenTogether(IndexedByCondition):
    """All tokens of all sequences see the same keys."""

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = scores.sum((0, 1)).topk(CHOSEN).indices
        return (torch.zeros_like(scores, dtype=torch.bool).index_fill(-1, indices, True) & mask).unsqueeze(1)


class BesideSinks(Indexed, Sink):
    """Hunyuan 4: hidden keys have the lowest number. The first token sees none."""

    def mask(self) -> Tensor:
        blind = torch.arange(self.sizes.tokens).unsqueeze(-1) == 0
        return torch.zeros(self.allowed().shape).double().masked_fill(~self.allowed() | blind, LOWEST)

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        indices = (scores + mask).topk(CHOSEN, dim=-1).indices
        hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, indices, False)
        return mask.masked_fill(hidden, LOWEST).unsqueeze(1)


class ChosenByTheLowest(Indexed):
    """Nothing but the choice hides keys, by the lowest number."""

    def chosen(self, scores: Tensor, mask: Any) -> Tensor:
        return torch.full_like(scores, LOWEST).scatter(-1, scores.topk(CHOSEN, dim=-1).indices, 0.0).unsqueeze(1)
