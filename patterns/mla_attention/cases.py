"""Layers whose attention is over latents, or only looks like it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_fx.cases import DR, DV, HCKV, B, D, Layer, N, NoRotaryPart, S, T


class Absorbed(Layer):
    """DeepSeek's inference code: weight_uk multiplied into the query, weight_uv into the result."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        weight = self.kv_b.view(N, D + DV, HCKV)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        scores = torch.einsum("bnsc,btc->bnst", query, latent[:, 0])
        scores = scores + torch.einsum("bnsr,btr->bnst", q_rope, k_rope[:, 0])
        out = torch.einsum("bnst,btc->bnsc", (scores / (D + DR) ** 0.5 + mask).softmax(-1), latent[:, 0])
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])


class WrittenKeys(Layer):
    """Hugging Face since 5.23: the key is assembled by writing two slices of an empty tensor."""

    def keys(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        expanded = (latent @ self.kv_b.T).view(B, T, N, D + DV).transpose(1, 2)
        k_nope, value = torch.split(expanded, [D, DV], dim=-1)
        key = latent.new_empty(B, N, T, D + DR)
        key[..., :D] = k_nope
        key[..., D:] = k_rope
        return key, value


class Fused(Layer):
    """One call of PyTorch's attention, which AOTAutograd decomposes if value and query widths differ."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class QueryInTwo(Layer):
    """The nope and rope part of the query are projected separately, joined, and split again."""

    def query(self, x: Tensor) -> Tensor:
        weights = torch.split(self.q_b.view(N, D + DR, -1), [D, DR], dim=1)
        latent = self.norm(x @ self.q_a.T, self.q_gamma)
        return torch.cat([torch.einsum("bsc,ndc->bsnd", latent, part) for part in weights], dim=-1)


class KeysPerHead(Layer):
    def keys(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys(latent, k_rope * torch.arange(1.0, N + 1).view(1, N, 1, 1))


class Sink(Layer):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) + mask
        sink = torch.ones(B, N, S, 1)
        return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1] @ value


class CodedProbabilities(Layer):
    """int8 attention: each row of probabilities is quantised before it multiplies the values."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        probabilities = scores.softmax(-1)
        step = probabilities.amax(-1, keepdim=True) / 127
        out: Tensor = torch.round(probabilities / step) @ value * step
        return out


class ExpandedCache(Layer):
    """transformers before 5: keys and values of every head are cached."""

    def keys(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        key, value = super().keys(latent, k_rope)
        position = torch.arange(T)
        caches = torch.zeros(B, N, T, D + DR), torch.zeros(B, N, T, DV)
        return caches[0].index_copy(2, position, key), caches[1].index_copy(2, position, value)


class HiddenStates(NoRotaryPart):
    """Multi-head attention: nothing was projected down for keys and values."""

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x[..., :HCKV], self.kv_gamma).unsqueeze(1), x[..., :DR].unsqueeze(1)


class OneKey(Layer):
    """The absorbed query and the key are one tensor each; the values are the first columns of the key."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        weight = self.kv_b.view(N, D + DV, HCKV)
        query = torch.cat((torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D]), q_rope), dim=-1)
        query, key = query * torch.arange(1.0, S + 1).view(S, 1), torch.cat((latent, k_rope), dim=-1)
        key = torch.zeros(B, 1, T, HCKV + DR).index_copy(2, torch.arange(T), key)
        out = (query @ key.transpose(-1, -2) + mask).softmax(-1) @ key[..., :HCKV]
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])


class Chunk(Absorbed):
    """A part of a context, merged with what others gave: here with a row of zeros and a logarithm of zero."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        weight = self.kv_b.view(N, -1, HCKV)
        query = torch.einsum("bnsd,ndc->bnsc", q_nope, weight[:, :D])
        scores = torch.einsum("bnsc,btc->bnst", query, latent[:, 0])
        scores = (scores + torch.einsum("bnsr,btr->bnst", q_rope, k_rope[:, 0])) * (D + DR) ** -0.5 + mask
        out = torch.einsum("bnst,btc->bnsc", scores.softmax(-1), latent[:, 0])
        out = out * self.lse(scores).sigmoid().unsqueeze(-1)
        return torch.einsum("bnsc,nvc->bnsv", out, weight[:, D:])

    def lse(self, scores: Tensor) -> Tensor:
        return scores.logsumexp(-1)


class ByHand(Chunk):
    def lse(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        return ((scores - largest).exp().sum(-1, keepdim=True).log() + largest).squeeze(-1)


class OfHalf(Chunk):
    def lse(self, scores: Tensor) -> Tensor:
        return (scores * 0.5).logsumexp(-1)


class ExpandedKeys(Layer):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        out: Tensor = scores.softmax(-1) @ value * scores.logsumexp(-1).sigmoid().unsqueeze(-1)
        return out


class DividedLate(Layer):
    """Flash attention divides so. Its scores are in base 2."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        scores = scores / math.log(2)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp2()
        total = weights.sum(-1, keepdim=True)
        out: Tensor = (weights @ value) / total * (largest + total.log2()).sigmoid()
        return out


class RunningSums(Layer):
    """Flash attention's loop over parts of the context, whose exponentials are divided by their sum at the end."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor) -> Tensor:
        key, value = self.keys(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * (D + DR) ** -0.5 + mask
        half, total = T // 2 + 1, torch.zeros(B, N, S, 1)
        largest, out = torch.full_like(total, -math.inf), torch.zeros(B, N, S, DV)
        for part, values in (
            (scores[..., : half - 2], value[..., : half - 2, :]),
            (scores[..., half:], value[..., half:, :]),
        ):
            new = torch.maximum(largest, part.amax(-1, keepdim=True))
            weights, shrink = (part - new).exp(), (largest - new).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out, largest = out * shrink + weights @ values, new
        return self.divided(out, total, largest)

    def divided(self, out: Tensor, total: Tensor, largest: Tensor) -> Tensor:
        return out / total


class LargestScore(RunningSums):
    """What is computed from the largest score alone depends on it."""

    def divided(self, out: Tensor, total: Tensor, largest: Tensor) -> Tensor:
        return out / (total + largest.sigmoid())
