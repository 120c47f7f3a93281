"""Merges of attention in parts, in many spellings: rows that some parts, or all, do not see are what they are in eager
mode, NaN or zero. Near twins are refused by name."""

import itertools

import pytest
import torch
from lib import merges
from lib.layers import QUIET
from lib.merges import SINK, B, C, N, S, T, arguments, beside_a_sink, by_softmax, compiled, guarded, one_by_one
from torch import nn

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


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


@pytest.mark.parametrize("is_blank", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 16))])
@pytest.mark.parametrize("merge", merges.SPELLINGS)
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
    "two sinks": (lambda outs, lses: beside_a_sink(outs, [*lses, SINK.flip(0).expand_as(lses[0])]), PARTS),
    "a sink twice": (lambda outs, lses: beside_a_sink(outs, [*lses, SINK.expand_as(lses[0])]), PARTS),
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
