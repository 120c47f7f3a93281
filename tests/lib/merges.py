"""Spellings of merges: attention in parts `outs` [B,S,N,C] and the logarithms `lses` [B,S,N] of their sums."""

import functools
import warnings

import torch
from torch.nn.functional import logsigmoid

import mla_fx
from lib.layers import Rewritten

B, S, N, C, T = 4, 2, 3, 20, 6
# how many keys of each part the last token of a sequence sees: all, none of some parts, none at all
LENGTHS = torch.tensor([[6, 5, 4], [0, 3, 6], [5, 0, 0], [0, 0, 0]])


def arguments(dtype=torch.float64, parts=3):
    draw = torch.Generator().manual_seed(0)
    query, kv_cache = (torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in
                       ((B, S, N, C), (parts, B, T, C)))  # fmt: skip
    return query, kv_cache, LENGTHS.repeat(1, 6)[:, :parts]


def compiled(module, given, target="reference"):
    torch._dynamo.reset()
    run = Rewritten(module, target=target)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        return run(*given), run.report


def by_softmax(outs, lses):
    shares = torch.stack(lses).softmax(0).unsqueeze(-1)
    return (torch.stack(outs) * shares).sum(0)


def by_product(outs, lses):
    return torch.einsum("pbsn,pbsnc->bsnc", torch.stack(lses).softmax(0), torch.stack(outs))


def by_maximum(outs, lses):
    largest = functools.reduce(torch.maximum, lses)
    weights = [(lse - largest).exp() for lse in lses]
    return sum(out * (weight / sum(weights)).unsqueeze(-1) for out, weight in zip(outs, weights, strict=True))


def by_logaddexp(outs, lses):
    whole = functools.reduce(torch.logaddexp, lses)
    return sum(out * (lse - whole).exp().unsqueeze(-1) for out, lse in zip(outs, lses, strict=True))


def without_nan(outs, lses):
    lses = torch.stack(lses)
    shares = (lses - lses.logsumexp(0)).exp().nan_to_num(0).unsqueeze(-1)
    return (torch.stack(outs) * shares).sum(0)


def in_base_two(outs, lses):
    shares = [lse * 1.4426950408889634 for lse in lses]
    largest = torch.stack(shares).amax(0)
    weights = [(share - largest).exp2().unsqueeze(-1) for share in shares]
    return sum(map(torch.mul, outs, weights)) / sum(weights)


def guarded(outs, lses):
    """vLLM's plain merge: what is not a number counts as minus infinity, and weights of zero also zero the parts."""
    lses = torch.stack(lses)
    lses = torch.where(lses.isnan() | lses.isinf(), -torch.inf, lses)
    largest = lses.amax(0)
    weights = (lses - torch.where(largest == -torch.inf, 0, largest)).exp().unsqueeze(-1)
    outs = torch.where(weights == 0, 0, torch.stack(outs))
    return (outs * weights).sum(0) / weights.sum(0).clamp(min=1e-10)


def one_by_one(outs, lses):
    """A running merge, as over the chunks of a prompt."""
    out, lse = outs[0], lses[0]
    for other, own in zip(outs[1:], lses[1:], strict=True):
        largest = torch.maximum(lse, own)
        safe = torch.where(largest == -torch.inf, 0, largest)
        mine, theirs = (lse - safe).exp(), (own - safe).exp()
        total = mine + theirs
        out = (out * mine.unsqueeze(-1) + other * theirs.unsqueeze(-1)) / total.clamp(min=1e-30).unsqueeze(-1)
        lse = safe + total.log()
    return out


def by_sigmoids(outs, lses):
    """Ring attention."""
    out, lse = outs[0], lses[0].unsqueeze(-1)
    for other, own in zip(outs[1:], lses[1:], strict=True):
        own = own.unsqueeze(-1)
        out, lse = out - (own - lse).sigmoid() * (out - other), lse - logsigmoid(lse - own)
    return out


def by_last_dimension(outs, lses):
    shares = torch.stack(lses, -1).softmax(-1)
    return (shares.unsqueeze(-2) @ torch.stack(outs, -2)).squeeze(-2)


def by_product_from_the_left(outs, lses):
    return torch.einsum("pbsnc,pbsn->bsnc", torch.stack(outs), torch.stack(lses).softmax(0))


def in_place(outs, lses):
    whole, total = torch.stack(lses).logsumexp(0), torch.zeros_like(outs[0])
    for out, lse in zip(outs, lses, strict=True):
        total += out * (lse - whole).exp().unsqueeze(-1)
    return total


def multiplied_and_added(outs, lses):
    shares = torch.stack(lses).softmax(0).unsqueeze(-1)
    total = outs[0] * shares[0]
    for out, share in zip(outs[1:], shares[1:], strict=True):
        total = torch.addcmul(total, out, share)
    return total


def no_sum_is_zero(outs, lses):
    largest = torch.stack(lses).max(0).values
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = (torch.stack(lses) - largest).exp()
    total = weights.sum(0)
    return (torch.stack(outs) * (weights / torch.where(total == 0, 1.0, total)).unsqueeze(-1)).sum(0)


def gated(outs, lses):
    return by_softmax(outs, lses) * outs[0].sigmoid()


def of_heads_first(outs, lses):
    return by_softmax([out.transpose(1, 2) for out in outs], [lse.transpose(1, 2) for lse in lses])


SINK = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def beside_a_sink(outs, lses):
    shares = torch.stack([*lses, SINK.expand_as(lses[0])]).softmax(0).unsqueeze(-1)
    return sum(map(torch.mul, outs, shares[:-1]))


def less_what_a_sink_has(outs, lses):
    return by_logaddexp(outs, lses) * (functools.reduce(torch.logaddexp, lses) - SINK).sigmoid().unsqueeze(-1)


def from_a_sink(outs, lses):
    """A running merge that starts with the sink, whose exponential less itself is 1."""
    largest, total, out = SINK.expand_as(lses[0]), torch.ones_like(lses[0]), torch.zeros_like(outs[0])
    for other, own in zip(outs, lses, strict=True):
        new = torch.maximum(largest, own)
        mine, theirs = (largest - new).exp(), (own - new).exp()
        out = out * mine.unsqueeze(-1) + other * theirs.unsqueeze(-1)
        total, largest = total * mine + theirs, new
    return out / total.unsqueeze(-1)


SPELLINGS = [
    by_softmax, by_product, by_maximum, by_logaddexp, without_nan, in_base_two, guarded, one_by_one, gated,
    of_heads_first, by_sigmoids, by_last_dimension, by_product_from_the_left, in_place, multiplied_and_added,
    no_sum_is_zero, beside_a_sink, less_what_a_sink_has, from_a_sink,
]  # fmt: skip
