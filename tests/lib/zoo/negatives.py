"""Near misses, each with the reason it must be given, and attention that is no latent attention at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from . import classics
from .entries import Entry, expanded_cache_arguments
from .mla import LatentAttention, Spelling
from .norms import hf
from .projections import Biased
from .ropes import by_rotate_half, stride_two
from .sizes import SMALL, Step, Weights, gamma, weights


@dataclass(frozen=True)
class Negative(Entry):
    """`partial` (or `unfused`) says what is fused; `because` is a pattern for the reason of the nearest miss."""

    because: str = ""
    only: tuple[str, ...] = ("few",)


class Written(LatentAttention):
    """The composed module with hooks for what is made of the latents, for modules that differ there."""

    def forward(self, x: Tensor, tables: Any, positions: Tensor, mask: Any, caches: Any, place: Any) -> tuple[Any, ...]:
        sizes, (batch, steps) = self.sizes, x.shape[:2]
        q, latent, k_rope = self.project(x)
        q = self.multiply(self.norm(q, self.q_gamma, sizes.epsilon), self.q_up)
        q = q.view(batch, steps, sizes.heads, sizes.query).transpose(1, 2)
        q_nope, q_rope = q.split([sizes.nope, sizes.rope], dim=-1)
        tables = tuple(table.unsqueeze(1) for table in tables)
        q_rope, k_rope = self.rotate(q_rope, *tables), self.key(k_rope, tables)
        q_nope, q_rope = self.queries(q_nope, q_rope)
        old = self.before(caches)
        _, latents, keys = self.cache.store_both(caches, self.latent(latent), k_rope, place)
        operands = self.keys(q_nope, q_rope, self.context(latents), keys, self.kv_up, sizes)
        attended = operands.finish(self.attend(operands, mask, self.spelling.scale, self.scale))
        return (F.linear(attended.transpose(1, 2).flatten(2), self.out), *self.after(old, caches))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.down(x)

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the rotation, [B, H, S, D] each."""
        return q_nope, q_rope

    def latent(self, latent: Tensor) -> Tensor:
        return self.norm(latent, self.kv_gamma, self.sizes.epsilon)

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return self.rotate(k_rope.unsqueeze(1), *tables).squeeze(1)

    def context(self, latents: Tensor) -> Tensor:
        return latents

    def before(self, caches: Any) -> Any:
        return None

    def after(self, old: Any, caches: Any) -> tuple[Tensor, ...]:
        return ()


class LayerNorm(Written):
    def latent(self, latent: Tensor) -> Tensor:
        return F.layer_norm(latent, (self.sizes.kv_rank,), self.kv_gamma, None, self.sizes.epsilon)


class CentredByHand(Written):
    """LayerNorm without its name."""

    def latent(self, latent: Tensor) -> Tensor:
        return hf(latent - latent.mean(-1, keepdim=True), self.kv_gamma, self.sizes.epsilon)


class NormOverTokens(Written):
    def latent(self, latent: Tensor) -> Tensor:
        return self.kv_gamma * (latent * torch.rsqrt(latent.pow(2).mean(1, keepdim=True) + self.sizes.epsilon))


class NormOverHalf(Written):
    """The mean is taken over one half of what is normalised."""

    def latent(self, latent: Tensor) -> Tensor:
        half = latent[..., : self.sizes.kv_rank // 2]
        return self.kv_gamma * (latent * torch.rsqrt(half.pow(2).mean(-1, keepdim=True) + self.sizes.epsilon))


class ScaledBeforeNorm(Written):
    """A factor that the norm takes out again, so that epsilon is 10^4 times as large."""

    def latent(self, latent: Tensor) -> Tensor:
        return super().latent(latent * 0.01)


class ScaledKey(Written):
    """joey00072: the rotary key is divided by the number of heads."""

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return super().key(k_rope / self.sizes.heads, tables)


class ScaledNope(Written):
    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        return q_nope * 1.5, q_rope


class ScaledRopeByToken(Written):
    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        return q_nope, q_rope * by_token(q_rope)


class ScaledApart(Written):
    """Each part by numbers of its own for each token."""

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        return q_nope * by_token(q_nope), q_rope * by_token(q_rope).flip(0)


class ScaledByColumn(Written):
    """One number for each column of a head."""

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        columns = torch.linspace(0.5, 1.5, self.sizes.query)
        return q_nope * columns[: self.sizes.nope], q_rope * columns[self.sizes.nope :]


class ScaledByItself(Written):
    """Query and key are normalised head by head, the norm of the query being a number for each token and head."""

    def queries(self, q_nope: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        length = torch.cat((q_nope, q_rope), -1).norm(dim=-1, keepdim=True)
        return q_nope * length, q_rope * length


class ScaledByContext(Written):
    """The latent of each position of the context is multiplied by a number of its own when it is read."""

    def context(self, latents: Tensor) -> Tensor:
        return latents * torch.linspace(0.5, 1.5, latents.shape[1]).unsqueeze(-1)


def by_token(q: Tensor) -> Tensor:
    return torch.arange(1.0, 1 + q.shape[2]).view(-1, 1)


class NormedKey(Written):
    """dots3."""

    def __init__(self, spelling: Spelling, given: Weights) -> None:
        super().__init__(spelling, given)
        self.k_gamma = nn.Parameter(gamma(self.sizes.rope))

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return super().key(hf(k_rope, self.k_gamma, self.sizes.epsilon), tables)


class OtherTables(Written):
    """The key is rotated by the angles of other positions than the query."""

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return super().key(k_rope, tuple(table.roll(1, -1) for table in tables))


class RotatedBack(Written):
    """The key is rotated by the opposite angle."""

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return super().key(k_rope, (tables[0], -tables[1]))


class OtherLayout(Written):
    """The query reads interleaved pairs, the key halves."""

    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return by_rotate_half(k_rope.unsqueeze(1), *tables).squeeze(1)


class UnrotatedKey(Written):
    def key(self, k_rope: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        return k_rope


class NormedOnRead(Written):
    """ambisinister: what is cached is the latent before its norm, which is taken over the whole cache at every step."""

    def latent(self, latent: Tensor) -> Tensor:
        return latent

    def context(self, latents: Tensor) -> Tensor:
        return super().latent(latents)


class CachedAndAttendedDiffer(Written):
    """The cache holds the latent before its norm, the attention sees the norm of the new rows only."""

    def latent(self, latent: Tensor) -> Tensor:
        self.normed = super().latent(latent)
        return latent

    def context(self, latents: Tensor) -> Tensor:
        return latents + F.pad(self.normed, (0, 0, 0, latents.shape[1] - self.normed.shape[1]))


class OldCacheRead(Written):
    """The caches as they were are an output: they may not be overwritten before they are read."""

    def before(self, caches: Any) -> Any:
        return tuple(cache.clone() for cache in caches)

    def after(self, old: Any, caches: Any) -> tuple[Tensor, ...]:
        return tuple(cache * 2 for cache in old)


class OldCacheReadLazily(OldCacheRead):
    """The same through a sum, with the new cache in it."""

    def before(self, caches: Any) -> Any:
        return caches[0].sum(-1)

    def after(self, old: Any, caches: Any) -> tuple[Tensor, ...]:
        return (old - caches[0].sum(-1),)


class WrittenTwice(Written):
    """A second token is written over afterwards."""

    def after(self, old: Any, caches: Any) -> tuple[Tensor, ...]:
        caches[0][:, :, 0] = 3.0
        return ()


class KeyPerHead(Written):
    """Every head has a rotary key of its own."""

    def __init__(self, spelling: Spelling, given: Weights) -> None:
        super().__init__(spelling, given)
        self.k_heads = nn.Parameter(torch.linspace(-1, 1, 24 * 24).view(24, 24).sin())

    def forward(self, x: Tensor, tables: Any, positions: Tensor, mask: Any, caches: Any, place: Any) -> tuple[Any, ...]:
        sizes, (batch, steps) = self.sizes, x.shape[:2]
        q, latent, _ = self.down(x)
        q = self.multiply(self.norm(q, self.q_gamma, sizes.epsilon), self.q_up)
        q_nope, q_rope = q.view(batch, steps, sizes.heads, -1).transpose(1, 2).split([sizes.nope, sizes.rope], -1)
        k_rope = F.linear(x, self.k_heads).view(batch, steps, sizes.heads, sizes.rope).transpose(1, 2)
        tables = tuple(table.unsqueeze(1) for table in tables)
        q_rope, k_rope = stride_two(q_rope, *tables), stride_two(k_rope, *tables)
        kv = F.linear(self.latent(latent), self.kv_up).view(batch, steps, sizes.heads, -1).transpose(1, 2)
        k_nope, value = kv.split([sizes.nope, sizes.value], dim=-1)
        query, key = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        return (F.linear(out.transpose(1, 2).flatten(2), self.out),)


class OtherTokens(Written):
    """Latents are made of other hidden states than queries: cross attention."""

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.down(x)[0], *self.down(x.flip(0))[1:]


class WithBias(Written):
    def __init__(self, spelling: Spelling, given: Weights) -> None:
        super().__init__(spelling, given)
        self.q_a, self.kv_a = Biased(given.q_down), Biased(given.kv_down)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_a(x), *self.kv_a(x).split([self.sizes.kv_rank, self.sizes.rope], dim=-1)


NO_CACHE = Spelling(cache="none")

NEGATIVES = [
    Negative(Spelling(), LayerNorm, partial="the norm is none of the operator's", because="LayerNorm"),
    Negative(Spelling(), CentredByHand, partial="the norm is none of the operator's", because="matrix product|norm"),
    Negative(Spelling(), NormOverTokens, partial="the norm runs over tokens", because="norm|mean",
             only=("prefill", "few")),
    Negative(Spelling(), NormOverHalf, partial="the mean is over half of the row", because="norm|mean"),
    Negative(
        Spelling(), ScaledKey, partial="one table rotates query and key", because="q_rope relative to k_rope by 4"
    ),
    Negative(Spelling(), ScaledNope, partial="one factor for both parts", because="q_nope is multiplied by 1.5"),
    Negative(Spelling(), ScaledRopeByToken, partial="one factor for both parts", because="only q_rope is multiplied"),
    Negative(Spelling(), ScaledApart, partial="one factor for both parts", because="by different tensors"),
    Negative(Spelling(), ScaledByColumn, partial="weights are no factors", because="from column to column"),
    Negative(Spelling(), ScaledByItself, partial="the factor needs the query", because="computed from it"),
    Negative(Spelling(), NormedKey, partial="the operator does not norm the key", because="k_rope is normalised"),
    Negative(Spelling(), OtherTables, partial="one table rotates query and key", because="cos|sin"),
    Negative(Spelling(), RotatedBack, partial="one table rotates query and key", because="cos|sin|rotat"),
    Negative(Spelling(), OtherLayout, partial="one layout for query and key", because="layout"),
    Negative(Spelling(), UnrotatedKey, partial="query and key are rotated alike", because="rotat|rotary"),
    Negative(Spelling(), NormedOnRead, partial="the operator caches what it norms", because="norm|cache|write|matrix"),
    Negative(Spelling(), CachedAndAttendedDiffer, partial="the attention reads no cache", because="."),
    Negative(Spelling(), WithBias, partial="the operator has no bias", because="bias|matrix product|add"),
    Negative(Spelling(), OtherTokens, partial="rows come from other tokens than queries", because="token"),
    Negative(NO_CACHE, KeyPerHead, unfused="heads have keys of their own", because="across heads"),
]  # fmt: skip

SAFE = OldCacheRead, OldCacheReadLazily, WrittenTwice, ScaledBeforeNorm
RIGHT_WHATEVER_FUSES = [Negative(Spelling(), make, only=("decode", "few")) for make in SAFE]


# --- no latent attention at all --------------------------------------------------------------------------------------


class Llama(nn.Module):
    """Grouped queries, rotary over whole heads, causal. With `groups` equal to `heads` plain multi-head attention."""

    def __init__(self, groups: int, attention: str = "sdpa", is_rotated: bool = True) -> None:
        super().__init__()
        self.heads, self.groups, self.size, self.attention, self.is_rotated = 4, groups, 8, attention, is_rotated
        self.gamma = nn.Parameter(gamma(24))
        self.q, self.o = nn.Linear(24, 32, bias=False), nn.Linear(32, 24, bias=False)
        self.k, self.v = (nn.Linear(24, groups * 8, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = hf(x, self.gamma, 1e-5)
        q, k, v = (p(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.is_rotated:
            q, k = by_rotate_half(q, cos, sin), by_rotate_half(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        if self.attention == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = torch.softmax((q @ k.mT * self.size**-0.5 + mask).float(), -1).to(q.dtype) @ v
        return x + self.o(out.transpose(1, 2).flatten(2))


class WideValues(nn.Module):
    """Multi-head attention whose values are wider than its keys, so that SDPA is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 40)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Softmaxes(nn.Module):
    """A router and a classifier: softmaxes that belong to no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(24, 3), nn.Parameter(torch.randn(3, 24, 24) / 5)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        mixed = torch.einsum("bse,bsed->bsd", weights, torch.einsum("bsi,eoi->bseo", x, self.experts))
        return F.log_softmax(mixed, dim=-1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.layer(x)


OTHERS = {
    "multi_head": lambda: Llama(4),
    "grouped": lambda: Llama(2),
    "multi_query": lambda: Llama(1),
    "grouped_eager": lambda: Llama(2, "eager"),
    "multi_head_unrotated": lambda: Llama(4, is_rotated=False),
    "multi_query_unrotated": lambda: Llama(1, "eager", is_rotated=False),
    "wide_values": WideValues,
    "softmaxes": Softmaxes,
    "encoder_layer": Encoder,
}


def other_arguments(step: Step) -> tuple[Tensor, ...]:
    x = torch.linspace(-2, 2, step.batch * step.tokens * 24).sin().view(step.batch, step.tokens, 24)
    angle = torch.arange(step.tokens).unsqueeze(-1) * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
    mask = torch.full((step.tokens, step.tokens), float("-inf")).triu(1)
    return x, angle.cos(), angle.sin(), mask


def expanded_cache(step: Step) -> tuple[nn.Module, tuple[Any, ...]]:
    """Expanded keys and values are cached: there is no latent to attend to."""
    return classics.ExpandedCache(Spelling(), weights(SMALL)), expanded_cache_arguments(SMALL, step)


def batch_of_one(entry: Entry) -> tuple[Step, ...]:
    return tuple(replace(step, batch=1) for step in entry.steps)
