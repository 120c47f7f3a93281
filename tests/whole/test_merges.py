"""Merges of two parts that are right, and twins that are not: all stay the program's, and both parts fuse."""

import pytest
import torch
from lib.comparing import check_same
from lib.layers import QUIET, Reporting
from lib.zoo import parts, servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_gradients"),
    *(pytest.mark.filterwarnings(line) for line in QUIET),
]
FUSED = {"mla_prolog": 1, "latent_attention": 2}
LOG_2 = 0.6931471805599453


class Merged(parts.Shards):
    """Two parts of a context, merged by a function of their attention [2,B,S,N,R] and logarithms [2,B,S,N]."""

    def __init__(self, merge):
        super().__init__()
        self.joined = merge


class Overlapping(Merged):
    """Keys from 4 to 8 belong to both parts."""

    def shards(self, cache):
        for some in (slice(0, 8), slice(4, None)):
            yield some, torch.arange(cache.shape[1])[some]


def shared(outs, shares):
    return (outs * shares.unsqueeze(-1)).sum(0)


def by_maximum(outs, lses):
    shares = (lses - lses.amax(0)).exp()
    return shared(outs, shares / shares.sum(0))


def by_logaddexp(outs, lses):
    return shared(outs, (lses - torch.logaddexp(lses[0], lses[1])).exp())


def by_softmax(outs, lses):
    return shared(outs, lses.softmax(0))


def by_sigmoid(outs, lses):
    return torch.lerp(outs[1], outs[0], (lses[0] - lses[1]).sigmoid().unsqueeze(-1))


def guarded(outs, lses):
    known = torch.where(lses.isnan() | lses.isinf(), -torch.inf, lses)
    shares = (known - known.logsumexp(0).nan_to_num(0, neginf=0)).exp()
    return shared(torch.where(shares.unsqueeze(-1) == 0, 0.0, outs), shares)


MERGES = {
    "by maximum": by_maximum,
    "by logaddexp": by_logaddexp,
    "by softmax": by_softmax,
    "by sigmoid": by_sigmoid,
    "guarded": guarded,
    "logarithms in base two": lambda outs, lses: shared(outs, (lses - lses.logsumexp(0)).exp2()),
    "logarithms as if of base two": lambda outs, lses: by_softmax(outs, lses * LOG_2),
    "logarithms of another head": lambda outs, lses: by_softmax(outs, lses.roll(1, -1)),
    "logarithms of the other part": lambda outs, lses: by_softmax(outs, lses.flip(0)),
    "attention of the other part": lambda outs, lses: by_softmax(outs.flip(0), lses),
    "logarithms before the scale": lambda outs, lses: by_softmax(outs, lses / 14**-0.5),
    "logarithms times two": lambda outs, lses: by_softmax(outs, 2 * lses),
    "sums and not logarithms": lambda outs, lses: by_softmax(outs, lses.exp()),
    "shares of heads": lambda outs, lses: shared(outs, lses.softmax(-1)),
    "shares of tokens": lambda outs, lses: shared(outs, lses.softmax(-2)),
    "not divided": lambda outs, lses: shared(outs, (lses - lses.amax(0)).exp()),
    "divided twice": lambda outs, lses: by_softmax(outs, lses) / lses.softmax(0).sum(0).add(1).unsqueeze(-1),
    "the mean": lambda outs, lses: outs.mean(0) + 0 * lses.sum(0).unsqueeze(-1),
    "a sink that is counted twice": lambda outs, lses: shared(outs, torch.cat((lses, 0 * lses), 0).softmax(0)[:2]),
    "rounded shares": lambda outs, lses: shared(outs, lses.softmax(0).bfloat16().float()),
    "rounded logarithms": lambda outs, lses: by_softmax(outs, lses.bfloat16().float()),
    "the larger one alone": lambda outs, lses: torch.where((lses[0] > lses[1]).unsqueeze(-1), outs[0], outs[1]),
    "the first logarithm for both": lambda outs, lses: shared(outs, (lses[:1] - lses.logsumexp(0)).exp()),
}


@pytest.mark.parametrize("name", MERGES)
def test_a_merge_is_what_it_says(name):
    check(Merged(MERGES[name]))


@pytest.mark.parametrize("name", ["by softmax", "guarded"])
def test_parts_that_overlap(name):
    check(Overlapping(MERGES[name]))


def check(layer):
    """The second token is at position 0, which the second part does not see."""
    given, backend = servers.drafts(3, 2), Reporting(target="reference")
    given[1][0] = torch.tensor([1, 0])
    check_same(layer, given, torch.compile(layer, backend=backend), equal_nan=True)
    assert backend.reports[-1].fused == FUSED, str(backend.reports[-1])
