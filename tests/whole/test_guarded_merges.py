"""Sums of exponentials and merged attention behind guards: bounds that some numbers pass. One key has nearly all the
weight, or all keys are alike, or a row sees one key or none. What a guard changes stays as the program computes it."""

import pytest
import torch
from lib.comparing import check_same
from lib.layers import QUIET, Reporting
from lib.loops import Loop, drafts, hide, running_sums, same
from lib.zoo import parts, servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.interpreted,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
TARGETS = "reference", "inductor"
# Queries are scaled by these: large scores leave one key all the weight, scores near zero leave all keys the same.
SHARP, ALIKE = 60.0, 1e-4
SCALES = SHARP, 1.0, ALIKE


class Bounded(parts.Shards):
    """Two parts, merged by their logarithms. Functions change attention [2,B,S,N,R] and logarithms, and the result."""

    def __init__(self, change, end):
        super().__init__()
        self.change, self.end = change, end

    def joined(self, outs, lses):
        outs, lses = self.change(outs, lses)
        return self.end((outs * lses.softmax(0).unsqueeze(-1)).sum(0))


GUARDS = {  # of sums of exponentials; those of one key that has all the weight are 1
    "at least 1.05": lambda total: total.clamp(min=1.05),
    "at least two": lambda total: total.clamp(min=2.0),
    "at most 3": lambda total: total.clamp(max=3.0),
    "from 1.5 to 1.6 as 1.6": lambda total: total.clamp(min=1.6) + total.clamp(max=1.5) - 1.5,
    "its logarithm is at least 0.05": lambda total: total.log().clamp(min=0.05).exp(),
    "the larger of two": lambda total: torch.maximum(total, torch.full_like(total, 1.05)),
    "by a distance": lambda total: (total + 1.05 + (total - 1.05).abs()) / 2,
}
BOUNDS = {
    "both sides": lambda out: out.clamp(-8, 8),
    "hardtanh": lambda out: torch.nn.functional.hardtanh(out, -8, 8),
    "above": lambda out: out.clamp(max=8),
    "below": lambda out: torch.maximum(out, torch.full_like(out, -8.0)),
    "infinity": lambda out: out.nan_to_num(torch.nan, 1e4, -1e4),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("place", ["own", "whole"])
@pytest.mark.parametrize("guard", GUARDS)
def test_guarded_sums_are_the_programs(guard, place, target):
    check(Loop(running_sums(**{place: GUARDS[guard]})), drafts(), target, SCALES)


@pytest.mark.parametrize("target", TARGETS)
def test_a_sum_of_100_equal_keys_is_bounded(target):
    x, positions, _ = drafts()
    caches = tuple(cache[:, :1].repeat(1, 120, 1) for cache in servers.drafts(3, 2)[2])
    given = x, positions + 100, caches
    layer = Loop(running_sums(whole=lambda total: total.clamp(max=60)), (slice(0, 100), slice(100, None)))
    report = check(layer, given, target, [ALIKE])
    assert any("case that no attention" in miss.reason or "not weighted" in miss.reason for miss in report.misses)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bound", BOUNDS)
def test_bounded_attention_is_the_programs(bound, target):
    """Parts are merged by sums or by logarithms, or bounded before. Caches hold numbers beyond the bounds."""
    end = BOUNDS[bound]
    layers = (
        Loop(running_sums(end=end)),
        Bounded(lambda outs, lses: (outs, lses), end),
        Bounded(lambda outs, lses: (end(outs), lses), same),
    )
    for layer in layers:
        x, positions, caches = drafts()
        report = check(layer, (x, positions, tuple(20 * cache for cache in caches)), target)
        assert "latent_attention" in report.fused, str(report)


@pytest.mark.parametrize("number", [-50.0, -1e4, -1e30])
def test_bounded_logarithms_are_the_programs(number):
    """Rows that a mask of numbers hides have logarithms below these bounds."""
    report = check(Bounded(lambda outs, lses: (outs, lses.clamp(min=number)), same), drafts(), "reference")
    assert "merge_attention" not in report.fused, str(report)


@pytest.mark.parametrize("guard", [1e-20, 1e-6, 1.0])
def test_guards_that_only_empty_rows_pass_fuse(guard):
    def run(chunks):
        found = []
        for scores, hidden, latent in chunks:
            scores = hide(scores, hidden)
            largest = scores.amax(-1, keepdim=True)
            weights = (scores - largest.masked_fill(largest == -torch.inf, 0)).exp()
            found.append((weights @ latent, largest, weights.sum(-1, keepdim=True)))
        outs, peaks, totals = map(torch.stack, zip(*found, strict=True))
        peak = peaks.amax(0)
        shares = (peaks - peak.masked_fill(peak == -torch.inf, 0)).exp()
        return (outs * shares).sum(0) / (totals * shares).sum(0).clamp(min=guard)

    report = check(Loop(run), drafts(), "reference", SCALES)
    assert report.fused == {"mla_prolog": 1, "latent_attention": 1}, str(report)


def check(layer, given, target, scales=(1.0,)):
    """The report of the one graph that is compiled for all scales of the queries."""
    backend, weight = Reporting(target=target), layer.q_b.clone()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend)
    for scale in scales:
        layer.q_b.copy_(weight * scale)
        check_same(layer, given, compiled, equal_nan=True)
    (report,) = backend.reports
    return report
