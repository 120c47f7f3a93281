"""Masks and softmaxes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from .plain import Layer, Sizes


class BoolAdded(Layer):
    """Flags added to scores count as 0 and 1; they forbid nothing."""

    def mask(self) -> Tensor:
        return self.allowed()


class FlagsWritten(BoolAdded):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        bias = torch.zeros(mask.shape, dtype=scores.dtype)
        bias[:] = mask
        return (scores + bias).softmax(-1)


class BoolAsFill(BoolAdded):
    """vLLM, LLaMA: a bias made of a condition."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        bias = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        return (scores + bias).softmax(-1)


class BoolAndFlags(BoolAdded):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return (scores.masked_fill(~mask, float("-inf")) + mask).softmax(-1)


class Filled(BoolAdded):
    """Scores of hidden keys are replaced, whatever they are."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)


class FilledByWhere(BoolAdded):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return torch.where(mask, scores, float("-inf")).softmax(-1)


class MinusTenThousand(BoolAdded):
    """A fill that is small, not infinite: a row that sees nothing is uniform, not zero."""

    def allowed(self) -> Tensor:
        allowed = super().allowed()
        allowed[0] = False
        return allowed

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.masked_fill(~mask, -1e4).softmax(-1)


class SmallestNumber(MinusTenThousand):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


class BlindRow(MinusTenThousand):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return scores.masked_fill(~mask, float("-inf")).softmax(-1)


class BlindAdded(Layer):
    def allowed(self) -> Tensor:
        allowed = super().allowed()
        allowed[-1] = False
        return allowed


class ExpOverSum(Layer):
    """No maximum is subtracted before the exponential."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        exponential = torch.exp(scores + mask)
        return exponential / exponential.sum(-1, keepdim=True)


class ExpOverSumUnsqueezed(Layer):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        exponential = torch.exp(scores + mask - (scores + mask).amax(-1, keepdim=True))
        return exponential / exponential.sum(-1).unsqueeze(-1)


class LogSoftmax(Layer):
    """A logarithm that is exponentiated."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return (scores + mask).log_softmax(-1).exp()


class SafeSoftmax(Layer):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4)


class Sink(Layer):
    """One more score for each head, without a value."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.sinks = self.gamma(sizes.heads)

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return torch.cat((scores + mask, self.column(scores)), dim=-1).softmax(-1)[..., :-1]

    def column(self, scores: Tensor) -> Tensor:
        return self.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)


class TimesReciprocal(Layer):
    """Exponentials are multiplied by one over their sum."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        scores = scores + mask
        raised = (scores - scores.amax(-1, keepdim=True)).exp()
        return raised * raised.sum(-1, keepdim=True).reciprocal()


class SinkBesideSum(Sink):
    """The exponential of the sink is added to the sum of the others."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        scores, sinks = scores + mask, self.sinks.view(-1, 1, 1)
        largest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        raised = (scores - largest).exp()
        return raised / (raised.sum(-1, keepdim=True) + (sinks - largest).exp())


class OneMore(Layer):
    """The exponential of zero is added to the sum of the others; exponentials are computed twice."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        scores = scores + mask
        largest = scores.amax(-1, keepdim=True).clamp(min=0)
        total = (scores - largest).exp().sum(-1, keepdim=True) + (-largest).exp()
        return (scores - largest).exp() / total


class SinkLate(Sink):
    """The product with the values is divided by a sum that counts the sink, too."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.mT * 0.4 + mask
        joined = torch.cat((scores, self.column(scores)), dim=-1)
        raised = (joined - joined.amax(-1, keepdim=True)).exp()
        return raised[..., :-1] @ value / raised.sum(-1, keepdim=True)


class SinkFirst(Sink):
    """The largest score is subtracted once more."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        joined = torch.cat((self.column(scores), scores + mask), dim=-1)
        return (joined - joined.max(dim=-1, keepdim=True).values).softmax(-1)[..., 1:]


class BestKeys(Layer):
    """Each token attends to the keys with the best scores of their rotary parts."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        scores = q_rope.sum(1) @ k_rope.squeeze(1).mT + mask
        chosen = torch.full_like(scores, -torch.inf).scatter(-1, scores.topk(4).indices, 0.0)
        return super().attend(q_nope, q_rope, latent, k_rope, (mask + chosen).unsqueeze(1))


class Padded(Layer):
    """A padding mask of numbers, BERT's: ones are seen, and zeros get a low number."""

    def mask(self) -> Tensor:
        pad = self.allowed().to(torch.float64)
        pad[..., 1] = 0
        return pad

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return (scores + self.added(mask)).softmax(-1)

    def added(self, mask: Tensor) -> Tensor:
        return (1.0 - mask) * -10000.0


class PaddedLess(Padded):
    def added(self, mask: Tensor) -> Tensor:
        return (mask - 1) * 1e9


class PaddedReversed(Padded):
    def added(self, mask: Tensor) -> Tensor:
        return torch.rsub(mask, 1.0) * -3e4 + (-mask + 1.0) * -2e4


class RotaryMask(BoolAdded):
    """MLX: hidden rotary scores are a mask that is added to the others."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        nope = key.split([self.sizes.nope, self.sizes.rope], dim=-1)[0]
        added = torch.where(mask, q_rope @ k_rope.mT * 0.4, torch.finfo(q_rope.dtype).min)
        return F.scaled_dot_product_attention(q_nope, nope, value, attn_mask=added, scale=0.4)
