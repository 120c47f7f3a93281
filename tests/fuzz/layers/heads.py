"""Causal attention, one latent key for all heads, one context for all sequences, weights held in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .masks import Filled
from .plain import Layer, Sizes


class Causal(Layer):
    """No cache; the newest tokens see each other."""

    def mask(self) -> None:
        return None

    def caches(self) -> tuple[Tensor, ...]:
        return ()

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        return latent, k_rope

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4)


class Absorbed(Layer):
    """weight_uk is multiplied into the query; latent and rotary key are one key for all heads."""

    def weights(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return self.kv_b.view(sizes.heads, -1, sizes.rank).split([sizes.nope, sizes.value], dim=1)

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        up, down = self.weights()
        query = torch.cat((q_nope @ up, q_rope), dim=-1)
        return self.over_latents(query, torch.cat((latent, k_rope), dim=-1), latent, mask) @ down.mT

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        return self.probabilities(query @ key.mT * 0.4, mask) @ latent


class AbsorbedFilled(Absorbed, Filled):
    pass


class Summed(Absorbed):
    """The result is weighted by the logarithm of the sum that it was divided by, as parts of a context are."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        scores = query @ key.mT * 0.4 + mask
        return scores.softmax(-1) @ latent * self.lse(scores).sigmoid()

    def lse(self, scores: Tensor) -> Tensor:
        return scores.logsumexp(-1, keepdim=True)


class SummedByHand(Summed):
    def lse(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        return largest + (scores - largest).exp().sum(-1, keepdim=True).log()


class OneKey(Absorbed):
    """Query and key are one tensor each; values are the first columns of the key."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        key = torch.zeros_like(key).index_copy(2, torch.arange(key.shape[2]), key)
        query = query * torch.arange(1.0, 1 + query.shape[2], dtype=query.dtype).view(-1, 1)
        return super().over_latents(query, key, key[..., : self.sizes.rank], mask)


class Unrotated(Layer):
    """No rotary part: the scores are one product."""

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        return self.probabilities(q_nope @ key[..., : self.sizes.nope].mT * 0.4, mask) @ value


class AbsorbedGrouped(Absorbed):
    """PyTorch's attention with a single head of keys, values padded to their width."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        value = F.pad(latent, (0, self.sizes.rope))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4, enable_gqa=True)
        return out[..., : self.sizes.rank]


class AbsorbedCausal(Causal, Absorbed):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        return Absorbed.attend(self, q_nope, q_rope, latent, k_rope, mask)

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        value = F.pad(latent, (0, self.sizes.rope))
        key, value = (item.expand(-1, self.sizes.heads, -1, -1) for item in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4)
        return out[..., : self.sizes.rank]


class HeadsAsRows(AbsorbedCausal):
    """The one head of keys sees queries of all heads as rows of one."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        value = F.pad(latent, (0, self.sizes.rope))
        rows = query.flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(rows, key, value, is_causal=True, scale=0.4)
        return out.view(query.shape)[..., : self.sizes.rank]


class OneContext(Absorbed):
    """All sequences attend to one context, [T, R], which is not written."""

    def caches(self) -> tuple[Tensor, ...]:
        return self.random(self.sizes.context, self.sizes.rank), self.random(self.sizes.context, self.sizes.rope)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        return caches


class OneContextCausal(OneContext):
    def mask(self) -> None:
        return None

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        value = F.pad(latent, (0, self.sizes.rope))
        lead = query.shape[:2]
        key, value = (item.expand(*lead, -1, -1) for item in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4)
        return out[..., : self.sizes.rank]


class Groups(Layer):
    """The up projection is stored by groups of heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kv_b = nn.Parameter(self.kv_b.detach().view(2, -1, sizes.rank).clone())

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        up = torch.einsum("btc,goc->btgo", latent.squeeze(1), self.kv_b)
        up = up.reshape(*up.shape[:2], sizes.heads, -1).transpose(1, 2)
        k_nope, value = up.split([sizes.nope, sizes.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, sizes.heads, -1, -1)), dim=-1), value


class GroupedQueries(Groups):
    """So is the query projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.q_b = nn.Parameter(self.q_b.detach().view(2, -1, sizes.q_rank).clone())

    def query(self, compressed: Tensor) -> Tensor:
        return torch.einsum("bsc,goc->bsgo", compressed, self.q_b).flatten(2)


class TwoUps(Layer):
    """Keys and values have a projection each from the latents."""

    def orders(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The latents as keys are made of them, and as values are."""
        return latent, latent

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.sizes.heads
        weights = self.kv_b.unflatten(0, (heads, -1)).split([self.sizes.nope, self.sizes.value], dim=1)
        k_nope, value = (
            (rows.squeeze(1) @ weight.flatten(0, 1).T).unflatten(-1, (heads, -1)).transpose(1, 2)
            for rows, weight in zip(self.orders(latent), weights, strict=True)
        )
        return torch.cat((k_nope, k_rope.expand(-1, heads, -1, -1)), dim=-1), value


def riffled(value: Tensor, pieces: int) -> Tensor:
    """The last dimension in another order: every first element of each piece, then every second."""
    return value.unflatten(-1, (pieces, -1)).transpose(-1, -2).flatten(-2)


class OrderOfKeys(TwoUps):
    """Keys are projected from latents in another order of columns than values."""

    def orders(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return riffled(latent, 2), latent


class TwoOrders(TwoUps):
    def orders(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        return riffled(latent, 2), riffled(latent, 4)


class OrderOfValues(Absorbed):
    """The latents that are summed up are in another order than those in the scores."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        return super().over_latents(query, key, riffled(latent, 2), mask)


class RiffledQuery(Absorbed):
    """The scores use query and latents in the same other order, so they stay the same; values are in order."""

    def over_latents(self, query: Tensor, key: Tensor, latent: Tensor, mask: Any) -> Tensor:
        rank = self.sizes.rank
        (q_nope, q_rope), (k_nope, k_rope) = (item.split([rank, self.sizes.rope], dim=-1) for item in (query, key))
        scores = riffled(q_nope, 2) @ riffled(k_nope, 2).mT + q_rope @ k_rope.mT
        return self.probabilities(scores * 0.4, mask) @ latent
