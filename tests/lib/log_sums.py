"""Attention over pages of latents beside the logarithm of its sum, in many spellings."""

import math
import warnings

import torch
from torch import nn

import mla_fx
from lib.layers import Rewritten

B, S, N, T, RANK, ROPE, BLOCK = 3, 3, 4, 24, 16, 8, 8
SCALE = (RANK + ROPE) ** -0.5


class Attention(nn.Module):
    """Absorbed attention over pages, in pieces that tests override; `first` are the positions of first tokens."""

    def forward(self, query, query_rope, kv_cache, kr_cache, table, first):
        positions = first.unsqueeze(-1) + torch.arange(query.shape[1])
        latents, keys = (cache[table].flatten(1, 2) for cache in (kv_cache, kr_cache))
        scores = self.scores(query, query_rope, latents, keys)
        masked = self.masked(scores, positions)
        weights, lse = self.weights(masked), self.lse(masked, scores)
        return self.product(weights, latents), lse

    def product(self, weights, latents):
        return torch.einsum("bnst,btc->bsnc", weights.to(latents.dtype), latents)

    def scores(self, query, query_rope, latents, keys):
        nope, rope = torch.einsum("bsnc,btc->bnst", query, latents), torch.einsum("bsnr,btr->bnst", query_rope, keys)
        return (nope + rope) * SCALE

    def masked(self, scores, positions):
        seen = torch.arange(scores.shape[-1]) <= positions.unsqueeze(-1)
        return scores.masked_fill(~seen.unsqueeze(1), -torch.inf)

    def weights(self, scores):
        return scores.softmax(-1)

    def lse(self, masked, scores):
        return masked.logsumexp(-1)


class Kept(Attention):
    def lse(self, masked, scores):
        return masked.logsumexp(-1, keepdim=True).transpose(1, 2)


class Added(Attention):
    """The sum is computed a second time."""

    def lse(self, masked, scores):
        largest = masked.amax(-1, keepdim=True)
        return (largest + (masked - largest).exp().sum(-1, keepdim=True).log()).squeeze(-1)


class Maximum(Attention):
    def lse(self, masked, scores):
        largest = masked.max(-1).values
        return (masked - largest.unsqueeze(-1)).exp().sum(-1).log() + largest


class Divided(Attention):
    """The softmax itself is by hand."""

    def weights(self, scores):
        self.largest = scores.amax(-1, keepdim=True)
        weights = (scores - self.largest).exp()
        self.total = weights.sum(-1, keepdim=True)
        return weights / self.total

    def lse(self, masked, scores):
        return (self.total.log() + self.largest).squeeze(-1)


class DividedLate(Attention):
    """Flash attention divides the product with the latents."""

    def exponentials(self, masked):
        self.largest = masked.amax(-1)
        return (masked - torch.where(self.largest == -torch.inf, 0.0, self.largest).unsqueeze(-1)).exp()

    def forward(self, *given):
        self.total = None
        out, lse = super().forward(*given)
        return out / self.total.clamp(min=1e-30).transpose(1, 2).unsqueeze(-1), lse

    def weights(self, scores):
        raised = self.exponentials(scores)
        self.total = raised.sum(-1)
        return raised

    def lse(self, masked, scores):
        return self.largest + self.total.log()


class PowersOfTwo(DividedLate):
    """Scores, and logarithms, are in base 2."""

    def scores(self, *given):
        return super().scores(*given) / math.log(2)

    def exponentials(self, masked):
        self.largest = masked.amax(-1)
        return (masked - torch.where(self.largest == -torch.inf, 0.0, self.largest).unsqueeze(-1)).exp2()

    def lse(self, masked, scores):
        return self.largest + self.total.log2()


class OverRows(Attention):
    """Heads and tokens are one dimension of the scores."""

    def scores(self, query, query_rope, latents, keys):
        rows = torch.cat((query, query_rope), -1).transpose(1, 2).flatten(1, 2)
        return (rows @ torch.cat((latents, keys), -1).mT * SCALE).unflatten(1, (N, -1))


class Widened(Attention):
    def weights(self, scores):
        return scores.softmax(-1, dtype=torch.float32)

    def lse(self, masked, scores):
        return masked.float().logsumexp(-1)


class LessLogarithm(Attention):
    """The softmax has no sum but this one."""

    def weights(self, scores):
        return (scores - scores.logsumexp(-1, keepdim=True)).exp()


class Base2(Attention):
    def lse(self, masked, scores):
        return masked.logsumexp(-1) / math.log(2)


class Offset(Attention):
    def lse(self, masked, scores):
        return masked.logsumexp(-1) + 0.5


class Twice(Attention):
    def lse(self, masked, scores):
        return masked.logsumexp(-1) * Added.lse(self, masked, scores)


class Expanded(Attention):
    """Keys and values of each head, expanded from the latents of a prompt. Queries are the first columns."""

    def __init__(self, rank=RANK, nope=RANK, value=6):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.weights_of = [
            nn.Parameter(torch.randn(N, width, rank, generator=generator, dtype=torch.float64) / rank**0.5)
            for width in (nope, value)
        ]
        self.scale = (nope + ROPE) ** -0.5

    def scores(self, query, query_rope, latents, keys):
        key, self.values = (torch.einsum("btc,nvc->bntv", latents, w.to(latents.dtype)) for w in self.weights_of)
        key = torch.cat((key, keys.unsqueeze(1).expand(-1, N, -1, -1)), -1)
        query = torch.cat((query[..., : self.weights_of[0].shape[1]], query_rope), -1)
        return query.transpose(1, 2) @ key.mT * self.scale

    def product(self, weights, latents):
        return weights.to(latents.dtype) @ self.values


def arguments(dtype=torch.float64, *, sizes=(RANK, ROPE), block=BLOCK, heads=N, tokens=S):
    """Rows of pages that a table names in any order, and contexts of several lengths."""
    generator, pages = torch.Generator().manual_seed(1), T // BLOCK

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    queries = [drawn(B, tokens, heads, width) for width in sizes]
    caches = [drawn(B * pages + 1, block, width) for width in sizes]
    table = torch.randperm(B * pages + 1, generator=generator)[: B * pages].view(B, pages)
    return *queries, *caches, table, torch.tensor([pages * block - tokens - 1, 1, pages * block // 2])


def nearly_blind(*given):
    """The same where one sequence sees no key, and the first of three tokens of another."""
    return *given[:-1], torch.tensor([-1, -3, 2])


def compiled(module, given, target="reference", **options):
    torch._dynamo.reset()
    run = Rewritten(module, target=target, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        return run(*given), run.report


class Merged(nn.Module):
    """Attention over two parts of each context, merged by their logarithms, as servers and ring attention do it."""

    def forward(self, query, query_rope, kv_cache, kr_cache, table, *firsts):
        tables = table.tensor_split([table.shape[1] // 2], 1)
        parts = [
            Attention()(query, query_rope, kv_cache, kr_cache, pages, first)
            for pages, first in zip(tables, firsts, strict=True)
        ]
        outs, lses = zip(*parts, strict=True)
        lses = torch.stack(lses)
        shares = (lses - lses.logsumexp(0)).exp().transpose(2, 3).unsqueeze(-1)
        return torch.where(shares == 0, 0.0, torch.stack(outs) * shares).sum(0)


class Summed(nn.Module):
    """The same merged by sums of exponentials, which nothing has divided yet."""

    def forward(self, query, query_rope, kv_cache, kr_cache, table, *firsts):
        found = []
        for pages, first in zip(table.tensor_split([table.shape[1] // 2], 1), firsts, strict=True):
            part = Sums()
            out, largest = part(query, query_rope, kv_cache, kr_cache, pages, first)
            found.append((out, *(each.transpose(1, 2).unsqueeze(-1) for each in (largest, part.total))))
        outs, largest, totals = map(torch.stack, zip(*found, strict=True))
        shares = (largest - largest.amax(0)).exp()
        return (outs * shares).sum(0) / (totals * shares).sum(0)


class Sums(DividedLate):
    def forward(self, *given):
        return Attention.forward(self, *given)

    def lse(self, masked, scores):
        return self.largest


def in_parts(*given):
    """Positions are those in a part."""
    *others, table, first = given
    return *others, table, first, first - table.shape[1] // 2 * given[2].shape[1]


class Unmasked(Attention):
    def lse(self, masked, scores):
        return scores.logsumexp(-1)


SPELLINGS = [
    Attention, Kept, Added, Maximum, Divided, DividedLate, PowersOfTwo, OverRows, LessLogarithm, Base2, Offset, Twice,
]  # fmt: skip
