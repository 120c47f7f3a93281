"""Layers of latent attention that the zoo lacks, in float64: other masks, caches, softmaxes; two steps, two layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True)
class Sizes:
    batch: int = 2
    tokens: int = 3
    context: int = 8
    heads: int = 4
    hidden: int = 9
    q_rank: int = 7
    rank: int = 6
    nope: int = 5
    rope: int = 4
    value: int = 10
    start: int = 4

    @property
    def query(self) -> int:
        return self.nope + self.rope


SMALL = Sizes()


class Layer(nn.Module):
    """Called with hidden states, tables, positions, a mask and two caches. Others override a method or two."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.draw = torch.Generator().manual_seed(0)
        heads, rank = sizes.heads, sizes.rank
        self.q_a, self.q_b = self.weight(sizes.q_rank, sizes.hidden), self.weight(heads * sizes.query, sizes.q_rank)
        self.kv_a = self.weight(rank + sizes.rope, sizes.hidden)
        self.kv_b = self.weight(heads * (sizes.nope + sizes.value), rank)
        self.o = self.weight(sizes.hidden, heads * sizes.value)
        self.q_gamma, self.kv_gamma = self.gamma(sizes.q_rank), self.gamma(rank)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def weight(self, out: int, inner: int) -> nn.Parameter:
        return nn.Parameter(self.random(out, inner) * inner**-0.5)

    def gamma(self, size: int) -> nn.Parameter:
        return nn.Parameter(1 + 0.3 * self.random(size))

    # --- what it is called with ---------------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        sizes = self.sizes
        x = self.random(sizes.batch, sizes.tokens, sizes.hidden)
        return x, self.tables(), self.place(), self.mask(), self.caches()

    def tables(self) -> tuple[Tensor, ...]:
        return self.random(self.sizes.tokens, self.sizes.rope), self.random(self.sizes.tokens, self.sizes.rope)

    def place(self) -> Any:
        return torch.arange(self.sizes.start, self.sizes.start + self.sizes.tokens)

    def allowed(self) -> Tensor:
        return torch.arange(self.sizes.context) <= self.sizes.start + torch.arange(self.sizes.tokens).unsqueeze(-1)

    def mask(self) -> Tensor | None:
        allowed = self.allowed()
        return self.random(*allowed.shape).masked_fill(~allowed, -torch.inf)

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        lead = sizes.batch, 1, sizes.context
        return self.random(*lead, sizes.rank), self.random(*lead, sizes.rope)

    # --- what it computes ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        sizes = self.sizes
        batch, tokens = x.shape[:2]
        query = self.norm(x @ self.q_a.T, self.q_gamma) @ self.q_b.T
        q_nope, q_rope = query.view(batch, tokens, sizes.heads, -1).transpose(1, 2).split([sizes.nope, sizes.rope], -1)
        latent, k_rope = (x @ self.kv_a.T).split([sizes.rank, sizes.rope], dim=-1)
        latent = self.norm(latent, self.kv_gamma).unsqueeze(1)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.rotate(k_rope.unsqueeze(1), *tables)
        latent, k_rope = self.store(caches, latent, k_rope, place)
        out = self.attend(q_nope, q_rope, latent, k_rope, mask)
        return out.transpose(1, 2).reshape(batch, tokens, -1) @ self.o.T

    def norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        latents, keys = caches
        latents.index_copy_(2, place, latent)
        keys.index_copy_(2, place, k_rope)
        return latents, keys

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        up = (latent.squeeze(1) @ self.kv_b.T).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
        k_nope, value = up.split([sizes.nope, sizes.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, sizes.heads, -1, -1)), dim=-1), value

    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        scores = torch.cat((q_nope, q_rope), dim=-1) @ key.transpose(-1, -2) * 0.4
        return self.probabilities(scores, mask) @ value

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        return (scores + mask).softmax(-1)


# --- masks and softmaxes ---------------------------------------------------------------------------------------------


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
    """No peak is subtracted before the exponential."""

    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        exponential = torch.exp(scores + mask)
        return exponential / exponential.sum(-1, keepdim=True)


class ExpOverSumUnsqueezed(Layer):
    def probabilities(self, scores: Tensor, mask: Any) -> Tensor:
        exponential = torch.exp(scores + mask - (scores + mask).amax(-1, keepdim=True))
        return exponential / exponential.sum(-1).unsqueeze(-1)


class SafeSoftmax(Layer):
    def attend(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Any) -> Tensor:
        key, value = self.expanded(latent, k_rope)
        query = torch.cat((q_nope, q_rope), dim=-1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.4)


# --- causal, and one latent key for all heads ------------------------------------------------------------------------


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


# --- rotations -------------------------------------------------------------------------------------------------------


class ComplexRope(Layer):
    def tables(self) -> tuple[Tensor, ...]:
        return (torch.complex(*(self.random(self.sizes.tokens, self.sizes.rope // 2) for _ in range(2))),)

    def rotate(self, x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * self.turned(turn)).flatten(-2)

    def turned(self, turn: Tensor) -> Tensor:
        return turn


class ComplexFactor(ComplexRope):
    """YaRN's attention factor, multiplied into the table."""

    def turned(self, turn: Tensor) -> Tensor:
        return turn * 1.5


class ConjugatedTable(ComplexRope):
    def turned(self, turn: Tensor) -> Tensor:
        return turn.conj()


# --- caches ----------------------------------------------------------------------------------------------------------


class AtSlice(Layer):
    """A Python number says where the rows go."""

    def place(self) -> int:
        return self.sizes.start

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, place : place + self.sizes.tokens] = rows
        return caches


class AtNumber(AtSlice):
    """One token, at a number."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, place] = rows[:, :, 0]
        return caches


class AtLast(AtNumber):
    def place(self) -> int:
        return -1


class AtLastSlice(AtSlice):
    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[:, :, -self.sizes.tokens :] = rows
        return caches


class ReadFromTheEnd(Layer):
    """The newest 32 of fewer tokens."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        latents, keys = super().store(caches, latent, k_rope, place)
        return latents[:, :, -32:], keys[:, :, -32:]


class ClonedAndCopied(Layer):
    """The cache is written in a copy, and that copied back."""

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        copied = super().store(tuple(cache.clone() for cache in caches), latent, k_rope, place)
        for cache, written in zip(caches, copied, strict=True):
            cache.copy_(written)
        return copied


class OldAndNew(Layer):
    """What the cache held before is returned."""

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        old = caches[0][:, :, 2:5] * 2.0
        return super().forward(x, tables, place, mask, caches), old


class Batched(Layer):
    """Each sequence at its own positions, in a cache with a dimension of sequences."""

    def place(self) -> Tensor:
        return super().place() + torch.arange(self.sizes.batch).unsqueeze(-1) % 2

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        sequences = torch.arange(self.sizes.batch).unsqueeze(-1)
        for cache, rows in zip(caches, (latent, k_rope), strict=True):
            cache[sequences, 0, place] = rows.squeeze(1)
        return caches


class OneBuffer(AtSlice):
    """Both caches are slices of one buffer."""

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return (self.random(sizes.batch, 1, sizes.context, sizes.rank + sizes.rope),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        halves = caches[0][..., : self.sizes.rank], caches[0][..., self.sizes.rank :]
        return super().store(halves, latent, k_rope, place)


class OneBufferByLayer(Layer):
    """Both caches are parts of one buffer of all layers."""

    def caches(self) -> tuple[Tensor, ...]:
        sizes = self.sizes
        return (self.random(3, sizes.batch, 1, sizes.context, sizes.rank + 2),)

    def store(self, caches: Any, latent: Tensor, k_rope: Tensor, place: Any) -> tuple[Tensor, Tensor]:
        halves = caches[0][0][..., : self.sizes.rank], caches[0][1][..., : self.sizes.rope]
        return super().store(halves, latent, k_rope, place)


# --- more than one ---------------------------------------------------------------------------------------------------


class TwoSteps(Layer):
    """The same layer twice over one pair of caches, at positions that follow each other."""

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        first = super().forward(x, tables, place, mask, caches)
        return first, super().forward(first, tables, place - 2, mask, caches)


class TwoLayers(Layer):
    """Two layers with a cache of their own each."""

    def caches(self) -> tuple[Tensor, ...]:
        return (*super().caches(), *super().caches())

    def forward(self, x: Tensor, tables: Any, place: Any, mask: Tensor | None, caches: tuple[Tensor, ...]) -> Any:
        x = x + super().forward(x, tables, place, mask, caches[:2])
        return x + super().forward(x, tables, place, mask, caches[2:])


class Groups(Layer):
    """The up projection is held by groups of heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.kv_b = nn.Parameter(self.kv_b.detach().view(2, -1, sizes.rank).clone())

    def expanded(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.sizes
        up = torch.einsum("btc,goc->btgo", latent.squeeze(1), self.kv_b)
        up = up.reshape(*up.shape[:2], sizes.heads, -1).transpose(1, 2)
        k_nope, value = up.split([sizes.nope, sizes.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, sizes.heads, -1, -1)), dim=-1), value


S = SMALL
EVEN = Sizes(batch=3, tokens=3, context=8, heads=4, hidden=8, q_rank=8, rank=8, nope=4, rope=4, value=4)
LEVEL = Sizes(batch=4, tokens=4, context=4, heads=4, hidden=4, q_rank=4, rank=4, nope=4, rope=4, value=4, start=0)
SINGLE = Sizes(batch=3, tokens=1)
SQUARE = Sizes(tokens=4, context=4, heads=4, rank=4, start=0)

LAYERS: dict[str, tuple[type[Layer], Sizes]] = {
    "plain": (Layer, S),
    "plain even": (Layer, EVEN),
    "plain level": (Layer, LEVEL),
    "bool added": (BoolAdded, S),
    "flags written": (FlagsWritten, EVEN),
    "bool as fill": (BoolAsFill, S),
    "bool and flags": (BoolAndFlags, S),
    "minus ten thousand": (MinusTenThousand, S),
    "smallest number": (SmallestNumber, S),
    "blind row": (BlindRow, EVEN),
    "blind added": (BlindAdded, S),
    "exp over sum": (ExpOverSum, SQUARE),
    "exp over sum unsqueezed": (ExpOverSumUnsqueezed, SQUARE),
    "safe softmax": (SafeSoftmax, S),
    "causal": (Causal, EVEN),
    "absorbed": (Absorbed, S),
    "absorbed grouped": (AbsorbedGrouped, S),
    "absorbed causal": (AbsorbedCausal, EVEN),
    "heads as rows": (HeadsAsRows, S),
    "one context": (OneContext, EVEN),
    "one context causal": (OneContextCausal, EVEN),
    "complex": (ComplexRope, EVEN),
    "complex factor": (ComplexFactor, S),
    "conjugated table": (ConjugatedTable, S),
    "at slice": (AtSlice, EVEN),
    "at number": (AtNumber, SINGLE),
    "at last": (AtLast, SINGLE),
    "at last slice": (AtLastSlice, S),
    "read from the end": (ReadFromTheEnd, S),
    "cloned and copied": (ClonedAndCopied, S),
    "old and new": (OldAndNew, S),
    "batched": (Batched, EVEN),
    "one buffer": (OneBuffer, S),
    "one buffer by layer": (OneBufferByLayer, S),
    "two steps": (TwoSteps, S),
    "two layers": (TwoLayers, S),
    "groups": (Groups, EVEN),
}
