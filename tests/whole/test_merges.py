"""Merges of two parts that are right, which become one operator, and twins that are not, which stay the program's."""

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


RIGHT = {
    "by maximum": by_maximum,
    "by logaddexp": by_logaddexp,
    "by softmax": by_softmax,
    "by sigmoid": by_sigmoid,
    "guarded": guarded,
    "logarithms of another head": lambda outs, lses: by_softmax(outs, lses.roll(1, -1)),
    "logarithms of the other part": lambda outs, lses: by_softmax(outs, lses.flip(0)),
    "attention of the other part": lambda outs, lses: by_softmax(outs.flip(0), lses),
    "divided twice": lambda outs, lses: by_softmax(outs, lses) / lses.softmax(0).sum(0).add(1).unsqueeze(-1),
}
TWINS = {
    "logarithms in base two": lambda outs, lses: shared(outs, (lses - lses.logsumexp(0)).exp2()),
    "logarithms as if of base two": lambda outs, lses: by_softmax(outs, lses * LOG_2),
    "logarithms before the scale": lambda outs, lses: by_softmax(outs, lses / 14**-0.5),
    "logarithms times two": lambda outs, lses: by_softmax(outs, 2 * lses),
    "sums and not logarithms": lambda outs, lses: by_softmax(outs, lses.exp()),
    "shares of heads": lambda outs, lses: shared(outs, lses.softmax(-1)),
    "shares of tokens": lambda outs, lses: shared(outs, lses.softmax(-2)),
    "not divided": lambda outs, lses: shared(outs, (lses - lses.amax(0)).exp()),
    "the mean": lambda outs, lses: outs.mean(0) + 0 * lses.sum(0).unsqueeze(-1),
    "a sink that is counted twice": lambda outs, lses: shared(outs, torch.cat((lses, 0 * lses), 0).softmax(0)[:2]),
    "rounded shares": lambda outs, lses: shared(outs, lses.softmax(0).bfloat16().float()),
    "rounded logarithms": lambda outs, lses: by_softmax(outs, lses.bfloat16().float()),
    "the larger one alone": lambda outs, lses: torch.where((lses[0] > lses[1]).unsqueeze(-1), outs[0], outs[1]),
    "the first logarithm for both": lambda outs, lses: shared(outs, (lses[:1] - lses.logsumexp(0)).exp()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_merge_is_an_operator(name):
    check(Merged(RIGHT[name]), {**FUSED, "merge_attention": 1})


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays_what_it_is(name):
    check(Merged(TWINS[name]), FUSED)


@pytest.mark.parametrize("name", ["by softmax", "guarded"])
def test_parts_that_overlap(name):
    """A merge of what it is given, even if keys count twice."""
    check(Overlapping(RIGHT[name]), {**FUSED, "merge_attention": 1})


def check(layer, fused):
    """The second token is at position 0, which the second part does not see."""
    given, backend = servers.drafts(3, 2), Reporting(target="reference")
    given[1][0] = torch.tensor([1, 0])
    check_same(layer, given, torch.compile(layer, backend=backend), equal_nan=True)
    assert backend.reports[-1].fused == fused, str(backend.reports[-1])
