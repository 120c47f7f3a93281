"""Merges of attention in parts, in many spellings: rows that some parts, or all, do not see are what they are in eager
mode, NaN or zero. Near twins are refused by name."""

import functools
import itertools
import warnings

import pytest
import torch
from lib.layers import QUIET
from torch import nn
from torch.nn.functional import logsigmoid

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
B, S, N, C, T = 4, 2, 3, 20, 6
# how many keys of each part the last token of a sequence sees: all, none of some parts, none at all
LENGTHS = torch.tensor([[6, 5, 4], [0, 3, 6], [5, 0, 0], [0, 0, 0]])


class Merged(nn.Module):
    def __init__(self, merge, count=2, *, is_blank=False):
        super().__init__()
        self.merge, self.count, self.is_blank = merge, count, is_blank

    def forward(self, query, kv_cache, lengths):
        parts = [self.part(query, kv_cache[part], lengths[:, part]) for part in range(self.count)]
        return self.merge(*zip(*parts, strict=True))

    def part(self, query, kv_cache, lengths):
        out, lse = torch.ops.mla_fx.attention(
            query, None, kv_cache, None, None, lengths, scale=0.3, return_lse=True
        )
        # as a plain softmax gives it
        return (torch.where((lse == -torch.inf).unsqueeze(-1), torch.nan, out) if self.is_blank else out), lse


def arguments(dtype=torch.float64, parts=3):
    draw = torch.Generator().manual_seed(0)
    query, kv_cache = (torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in
                       ((B, S, N, C), (parts, B, T, C)))  # fmt: skip
    return query, kv_cache, LENGTHS.repeat(1, 6)[:, :parts]


def compiled(module, given, target="reference"):
    torch._dynamo.reset()
    run = torch.compile(module, backend=mla_fx.get_backend(target=target), dynamic=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        return run(*given), mla_fx.last_report()


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


SPELLINGS = [
    by_softmax, by_product, by_maximum, by_logaddexp, without_nan, in_base_two, guarded, one_by_one, gated,
    of_heads_first, by_sigmoids, by_last_dimension, by_product_from_the_left, in_place, multiplied_and_added,
    no_sum_is_zero,
]  # fmt: skip


@pytest.mark.parametrize("is_blank", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 16))])
@pytest.mark.parametrize("merge", SPELLINGS)
def test_spellings(merge, count, is_blank):
    module, given = Merged(merge, count, is_blank=is_blank), arguments(parts=max(count, 3))
    found, report = compiled(module, given)
    assert report.fused == {"latent_attention": count, "merge_attention": 1}, str(report)
    wanted = module(*given)
    assert wanted[0].isfinite().all()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("merge", [by_softmax, guarded, one_by_one])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_coarser_than_the_program(merge, dtype):
    """Against the program in float64."""
    module, given = Merged(merge, 3), arguments(dtype)
    found, report = compiled(module, given, "inductor")
    assert report.fused == {"latent_attention": 3, "merge_attention": 1}, str(report)
    near, exact = module(*given), module(*(part.double() if part.is_floating_point() else part for part in given))
    seen = exact.isfinite()
    assert found.dtype == near.dtype and torch.equal(found.isnan(), near.isnan())
    assert (found - exact)[seen].norm() <= 2 * (near - exact)[seen].norm()


def test_values_that_come_with_it_stay():
    """The sum of weights is read, too."""

    def merge(outs, lses):
        weights = torch.stack(lses).softmax(0)
        return (torch.stack(outs) * weights.unsqueeze(-1)).sum(0), weights

    given = arguments()
    found, report = compiled(Merged(merge), given)
    assert report.fused["merge_attention"] == 1
    torch.testing.assert_close(found, Merged(merge)(*given), rtol=1e-9, atol=1e-10, equal_nan=True)


def clamped(outs, lses):
    """Rows that no part sees are neither zero nor NaN."""
    return by_softmax(outs, [lse.clamp(min=-1e30) for lse in lses])


def of_the_first(outs, lses):
    """Its exponentials may overflow."""
    weights = [(lse - lses[0]).exp().unsqueeze(-1) for lse in lses]
    return sum(map(torch.mul, outs, weights)) / sum(weights)


def where_equal(outs, lses):
    return torch.where((lses[0] - lses[1] == 0).unsqueeze(-1), 0, by_softmax(outs, lses))


def far_apart(outs, lses):
    return torch.where((lses[0] > lses[1] + 50).unsqueeze(-1), outs[0], by_softmax(outs, lses))


PARTS = "expected 2 to 16 parts of attention, each with a logarithm"
OTHERWISE = "something else than the parts times their shares is computed"
REPLACED = "NaN of a part is replaced, whatever it comes from"
SHARES = "parts are not weighted by the shares that their logarithms give them"
TWINS = {
    "the first as if it were the largest": (of_the_first, SHARES),
    "logarithms that are bounded": (clamped, SHARES),
    "one weight for all": (lambda outs, lses: sum(outs) * lses[0].exp().unsqueeze(-1), PARTS),
    "a square": (lambda outs, lses: by_softmax([out * out for out in outs], lses), OTHERWISE),
    "NaN replaced": (lambda outs, lses: by_softmax([out.nan_to_num(0) for out in outs], lses), REPLACED),
    "a part twice": (lambda outs, lses: by_softmax((outs[0], outs[0]), lses), PARTS),
    "in base two": (lambda outs, lses: by_softmax(outs, [lse * 0.6931471805599453 for lse in lses]), SHARES),
}
INSIDE = {
    "one more": lambda outs, lses: by_softmax(outs, lses) + 1,
    "zero where logarithms are equal": where_equal,
    "a part alone where it is much larger": far_apart,
}


@pytest.mark.parametrize("name", TWINS)
def test_twins(name):
    merge, because = TWINS[name]
    report = same(merge, arguments())
    assert report.fused == {"latent_attention": 2}, str(report)
    assert because in [miss.reason for miss in report.misses if miss.pattern == "merge_attention"], str(report)


@pytest.mark.parametrize("name", INSIDE)
def test_merges_in_what_is_none(name):
    """The parts of the first sequence are equal."""
    given = arguments()
    given[1][1, 0], given[2][0, 1] = given[1][0, 0], given[2][0, 0]
    assert same(INSIDE[name], given).fused == {"latent_attention": 2, "merge_attention": 1}


def same(merge, given):
    found, report = compiled(Merged(merge), given)
    torch.testing.assert_close(found, Merged(merge)(*given), rtol=1e-9, atol=1e-10, equal_nan=True)
    return report


# --- neighbouring pieces of one context ------------------------------------------------------------------------------


class Pieces(nn.Module):
    """Attention to rows `bounds[0]` to `bounds[1]`, `bounds[1]` to `bounds[2]`, and so on, merged."""

    def __init__(self, hidden="", bounds=(0, 8, 16, 24), merge=one_by_one):
        super().__init__()
        self.hidden, self.bounds, self.merge = hidden, bounds, merge

    def forward(self, query, query_rope, kv_cache, kr_cache, mask, lengths):
        parts = [
            self.part(query, query_rope, *self.rows(kv_cache, kr_cache, first, last), mask, lengths, first, last)
            for first, last in itertools.pairwise(self.bounds)
        ]
        return self.merge(*zip(*parts, strict=True))

    def rows(self, kv_cache, kr_cache, first, last):
        return kv_cache[:, first:last], kr_cache[:, first:last], None

    def part(self, query, query_rope, latents, keys, table, mask, lengths, first, last):
        own = {"bool": mask[..., first:last] > -1, "added": mask[..., first:last]}.get(self.hidden)
        if self.hidden == "added, some":
            own = mask[..., first:last] if first else None
        lengths = lengths - first if self.hidden == "lengths" else None
        given = query, query_rope, latents, keys, own, lengths, None, table
        return torch.ops.mla_fx.attention(*given, scale=0.3, return_lse=True)


class Paged(Pieces):
    BLOCK = 4

    def rows(self, kv_cache, kr_cache, first, last):
        table = torch.arange(kv_cache.shape[0] * kv_cache.shape[1] // self.BLOCK).flip(0).view(kv_cache.shape[0], -1)
        pages = (cache.reshape(-1, self.BLOCK, cache.shape[-1]) for cache in (kv_cache, kr_cache))
        return *pages, table[:, first // self.BLOCK : last // self.BLOCK]


class Strided(Pieces):
    def rows(self, kv_cache, kr_cache, first, last):
        return kv_cache[:, ::2][:, first:last], kr_cache[:, ::2][:, first:last], None


class Twisted(Pieces):
    """Rotary keys of the pieces in the opposite order."""

    def rows(self, kv_cache, kr_cache, first, last):
        return kv_cache[:, first:last], kr_cache[:, 24 - last : 24 - first], None


class Doubled(Pieces):
    """The later piece has another query."""

    def part(self, query, *rest):
        return super().part(query if rest[-2] == 0 else query * 2, *rest)


def rows(dtype=torch.float64):
    draw = torch.Generator().manual_seed(2)
    sizes = (B, S, N, C), (B, S, N, 6), (B, 24, C), (B, 24, 6), (B, 1, S, 24)
    *given, mask = (torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes)
    mask[1, ..., :8], mask[2, ..., 8:] = -torch.inf, -torch.inf
    return *given, mask, torch.tensor([24, 9, 2, 0])


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hidden", ["", "bool", "added", "lengths"])
@pytest.mark.parametrize("kind", [Pieces, Paged])
def test_neighbouring_pieces_are_one_context(kind, hidden, dynamic):
    module, given = kind(hidden), rows()
    torch._dynamo.reset()
    run = torch.compile(module, backend=mla_fx.get_backend(target="reference"), dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(run(*given), module(*given), rtol=1e-9, atol=1e-10)
    assert mla_fx.last_report().fused == {"latent_attention": 1}, str(mla_fx.last_report())


@pytest.mark.parametrize(
    "module, left",
    [
        (Pieces(bounds=(0, 8, 12, 24)), 1),
        (Pieces(bounds=(3, 8, 24)), 1),
        (Strided("lengths", bounds=(0, 4, 12)), 1),
        (Twisted(), 3),
        (Doubled(), 2),
        (Pieces("added, some"), 2),
    ],
    ids=["unlike sizes", "not all rows", "every second row", "other rotary keys", "another query", "other masks"],
)
def test_pieces_and_their_twins(module, left):
    given = rows()
    found, report = compiled(module, given)
    torch.testing.assert_close(found, module(*given), rtol=1e-9, atol=1e-10)
    merged = {} if left == 1 else {"merge_attention": 1}
    assert report.fused == {"latent_attention": left, **merged}, str(report)


def test_pieces_that_are_dropped_if_they_are_not_numbers():
    """NaN in one of them must not reach the others."""
    given = rows()
    given[2][0, 9] = torch.nan
    found, report = compiled(Pieces(merge=guarded), given)
    assert report.fused == {"latent_attention": 3, "merge_attention": 1}, str(report)
    torch.testing.assert_close(found, Pieces(merge=guarded)(*given), rtol=1e-9, atol=1e-10)
    assert found.isfinite().all()


def test_pieces_whose_logarithms_are_read():
    """They would be computed twice."""

    def merge(outs, lses):
        return one_by_one(outs, lses), lses[0]

    found, report = compiled(Pieces("bool", merge=merge), rows())
    assert report.fused == {"latent_attention": 3, "merge_attention": 1}, str(report)
    torch.testing.assert_close(found, Pieces("bool", merge=merge)(*rows()), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["mask", "indices"])
def test_pieces_in_which_keys_are_chosen_are_not_joined(name):
    """Their numbers count from the start of each piece."""
    query, kv_cache, _ = arguments(parts=1)
    value = {"mask": torch.ones(1, dtype=torch.bool), "indices": torch.tensor([2, 0]).expand(B, S, 1, 2)}[name]

    def merged(query, latents, value):
        options = {"mask": None, "scale": 0.3, name: value, "return_lse": True}
        halves = latents.split(T // 2, 1)
        parts = [torch.ops.mla_fx.attention(query, None, half, None, **options) for half in halves]
        return torch.ops.mla_fx.merge_attention(*map(list, zip(*parts, strict=True)))

    torch._dynamo.reset()
    found = torch.compile(merged, backend=mla_fx.get_backend(target="reference"))(query, kv_cache[0], value)
    torch.testing.assert_close(found, merged(query, kv_cache[0], value), rtol=1e-12, atol=1e-12)
    apart = {"sparse_latent_attention": 2, "merge_attention": 1}
    assert mla_fx.last_report().fused == (apart if name == "indices" else {"latent_attention": 1})
