"""Attention in parts that are merged by sums of exponentials, as in flash attention's loop. Every spelling becomes a
merge of attention, or one attention where the parts are neighbours. Near twins stay the program's."""

import copy

import pytest
import torch
from lib.comparing import check_same
from lib.layers import QUIET, Reporting, in_type
from lib.loops import Loop, drafts, hide, running_sums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
ONE = {"mla_prolog": 1, "latent_attention": 1}
PIECES = {"mla_prolog": 1, "latent_attention": 3, "merge_attention": 1}
GAP = (slice(0, 5), slice(6, 12), slice(12, 16))
NEIGHBOURS = ("guarded", "triples", "divided twice")  # rows that see no key of a part are no NaN there


def from_zeros(chunks):
    """Triton's tutorial: base two, sums that begin as zero."""
    scores, _, latent = chunks[0]
    out, total = torch.zeros(*scores.shape[:3], latent.shape[-1]), torch.zeros(scores.shape[:3])
    largest = torch.full_like(total, -torch.inf)
    for scores, hidden, latent in chunks:
        scores = hide(scores, hidden) * 1.44269504
        new = torch.maximum(largest, scores.max(-1)[0])
        weights = torch.exp2(scores - new[..., None])
        shrink = torch.exp2(largest - new)
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ latent
        largest = new
    return out / total[..., None]


def guarded(chunks):
    """Rows that see no key so far are zero, and stay zero if they see none at all."""
    scores, _, latent = chunks[0]
    out, total = torch.zeros(*scores.shape[:3], latent.shape[-1]), torch.zeros(*scores.shape[:3], 1)
    largest = torch.full_like(total, -torch.inf)
    for scores, hidden, latent in chunks:
        scores = hide(scores, hidden)
        new = torch.maximum(largest, scores.amax(-1, keepdim=True))
        safe = torch.where(new == -torch.inf, 0.0, new)
        weights, shrink = (scores - safe).exp(), (largest - safe).exp()
        total, out = total * shrink + weights.sum(-1, keepdim=True), out * shrink + weights @ latent
        largest = new
    return out / total.clamp(min=1e-20)


def triples(chunks):
    """Each part has its own largest score; all are merged at the end."""
    found = []
    for scores, hidden, latent in chunks:
        scores = hide(scores, hidden)
        largest = scores.amax(-1)
        safe = largest.masked_fill(largest == -torch.inf, 0)
        weights = (scores - safe.unsqueeze(-1)).exp()
        found.append((weights @ latent, largest, weights.sum(-1)))
    outs, peaks, totals = map(torch.stack, zip(*found, strict=True))
    shares = (peaks - peaks.amax(0)).exp()
    return (outs * shares.unsqueeze(-1)).sum(0) / (totals * shares).sum(0).unsqueeze(-1)


def divided_twice(chunks):
    """Each part is divided by its sum, and then merged with sums and largest scores, not with logarithms."""
    found = []
    for scores, hidden, latent in chunks:
        scores = hide(scores, hidden)
        largest = scores.amax(-1, keepdim=True)
        safe = torch.where(largest == -torch.inf, 0, largest)
        weights = (scores - safe).exp()
        total = weights.sum(-1, keepdim=True)
        found.append((weights @ latent / total.clamp(min=1e-30), largest, total))
    peak = torch.stack([largest for _, largest, _ in found]).amax(0)
    shares = [total * (largest - peak).exp() for _, largest, total in found]
    return sum(out * share for (out, _, _), share in zip(found, shares, strict=True)) / sum(shares)


RIGHT = {
    "running": (running_sums(), PIECES),
    "from zeros": (from_zeros, PIECES),
    "guarded": (guarded, ONE),
    "triples": (triples, ONE),
    "divided twice": (divided_twice, ONE),
}


def twin(change):
    """A loop over parts whose sums some function changes: it gets weights, their sum, the factor by which earlier sums
    shrink, and the scores."""

    def loop(chunks):
        out = total = largest = 0.0
        for number, (scores, hidden, latent) in enumerate(chunks):
            scores = hide(scores, hidden)
            new = (
                scores.amax(-1, keepdim=True) if number == 0 else torch.maximum(largest, scores.amax(-1, keepdim=True))
            )
            weights, shrink = (scores - new).exp(), (largest - new).exp() if number else torch.ones(())
            weights, own, shrink = change(weights, weights.sum(-1, keepdim=True), shrink, scores)
            out, total, largest = out * shrink + weights @ latent, total * shrink + own, new
        return out / total

    return loop


def exponentiated(weights, total, shrink, scores):
    """Directly, which overflows for large scores."""
    weights = scores.exp()
    return weights, weights.sum(-1, keepdim=True), torch.ones(())


TWINS = {  # of weights w, their sum t, the shrinking factor k and scores s
    "sums do not shrink": lambda w, t, k, s: (w, t, torch.ones(())),
    "sums shrink twice": lambda w, t, k, s: (w, t, k * k),
    "twice the weights": lambda w, t, k, s: (w * 2, t, k),
    "twice the sum": lambda w, t, k, s: (w, t * 2, k),
    "sums of another head": lambda w, t, k, s: (w, t.roll(1, 1), k),
    "sums of another sequence": lambda w, t, k, s: (w, t.flip(0), k),
    "weights of another head": lambda w, t, k, s: (w.roll(1, 1), t, k),
    "weights of other keys": lambda w, t, k, s: (w.flip(-1), t, k),
    "sums of some keys": lambda w, t, k, s: (w, w[..., 1:].sum(-1, keepdim=True), k),
    "sums of at least two": lambda w, t, k, s: (w, t.clamp(min=2), k),
    "sums in base two": lambda w, t, k, s: (w, (s - s.amax(-1, keepdim=True)).exp2().sum(-1, keepdim=True), k),
    "rounded weights": lambda w, t, k, s: (w.bfloat16().float(), t, k),
    "small weights left out": lambda w, t, k, s: (torch.where(w < 0.1, 0.0, w), t, k),
    "exponentials without a difference": exponentiated,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_loop_is_attention(name):
    loop, fused = RIGHT[name]
    check(Loop(loop), fused)


@pytest.mark.parametrize("name", RIGHT)
def test_parts_that_are_no_neighbours_are_merged(name):
    loop, _ = RIGHT[name]
    check(Loop(loop, GAP), {**PIECES, "latent_attention": 2 if name in NEIGHBOURS else 3})


@pytest.mark.parametrize("name", ["running", "triples"])
def test_numbers_of_16_bits_by_inductor(name):
    """At most twice as far from float64 as eager mode."""
    layer, given, backend = Loop(RIGHT[name][0]).bfloat16(), in_type(drafts(), torch.bfloat16), Reporting()
    exact = copy.deepcopy(layer).double()(*in_type(given, torch.float64))
    eager, ours = layer(*copy.deepcopy(given)), torch.compile(layer, backend=backend)(*given)
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max()
    assert "latent_attention" in backend.reports[-1].fused, str(backend.reports[-1])


def test_the_largest_score_of_other_keys_is_unknown():
    """There it may be minus infinity, or finite, where that of the part is not."""

    def loop(chunks):
        scores = torch.cat([hide(scores, hidden) for scores, hidden, _ in chunks], -1)
        latents, out, total = torch.cat([latent for *_, latent in chunks], -2), 0.0, 0.0
        for some, others in ((slice(0, 8), slice(0, 16, 2)), (slice(8, 16), slice(8, 16))):
            weights = (scores[..., some] - scores[..., others].amax(-1, keepdim=True)).exp()
            shrink = scores[..., others].amax(-1, keepdim=True).exp()
            out, total = out + weights @ latents[..., some, :] * shrink, total + weights.sum(-1, keepdim=True) * shrink
        return out / total

    report = check(Loop(loop), None)
    assert "merge_attention" not in report.fused, str(report)


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays_what_it_is(name):
    report = check(Loop(twin(TWINS[name])), None)
    assert "merge_attention" not in report.fused, str(report)


def test_exponentials_that_are_read_elsewhere_stay():
    def loop(chunks):
        seen = []
        out = twin(lambda w, t, k, s: (seen.append(w) or w, t, k))(chunks)
        return out * seen[1].cumsum(-1)[..., -1:]

    report = check(Loop(loop), None)
    assert any("are also read by" in miss.reason for miss in report.misses), str(report)


def check(layer, fused):
    backend = Reporting(target="reference")
    check_same(layer, drafts(), torch.compile(layer, backend=backend), equal_nan=True)
    report = backend.reports[-1]
    assert fused is None or report.fused == fused, str(report)
    return report
