"""The option prove at small sizes: numbers that are added to positions are places in a cache, and shrink as it does.

The caches are so large that nothing is affordable at its own sizes."""

import pytest
import torch
from lib.faults import difference

from mla_fx.comparing import plans

ROWS = 4096


@pytest.fixture(autouse=True)
def small_sizes_alone(monkeypatch):
    monkeypatch.setattr(plans, "LARGEST", 16 * ROWS)


def written(to):
    return lambda cache, position, rows: cache.index_copy(1, position + to, rows)


def written_otherwise(cache, position, rows):
    return cache.index_put((torch.arange(2).unsqueeze(-1), position + 99 + 1), rows)


def attended(scores, keys):
    return scores.softmax(-1) @ keys


def seen(up_to):
    """Attention to the keys whose positions, compared with a query's, are `up_to`."""

    def function(cache, position, rows):
        mask = up_to(torch.arange(ROWS), position.unsqueeze(-1))
        return attended((rows @ cache.mT).masked_fill(~mask, -torch.inf), cache)

    return function


def read(start):
    return lambda cache, position, rows: cache.index_select(1, position + start) * rows


def read_otherwise(cache, position, rows):
    return rows * cache[:, position + 16]


def later(seen=None, log_sum=lambda scores: scores.logsumexp(-1)):
    """The second of two chunks, with its logarithm. A position before it sees no key."""

    def function(cache, position, rows):
        keys = cache[:, ROWS // 2 :]
        scores = rows @ keys.mT
        if seen is not None:
            scores = torch.where(seen(torch.arange(ROWS // 2), position.unsqueeze(-1)), scores, -torch.inf)
        return attended(scores, keys).sum(-1) + log_sum(scores)

    return function


def by_hand(scores):
    return scores.exp().sum(-1).log()


SEEN = seen(lambda keys, position: keys <= position + 64)
LATER = later(lambda keys, position: keys + ROWS // 2 <= position)  # as positions in the whole cache
FROM_ZERO = later(lambda keys, position: keys <= position - ROWS // 2, by_hand)


def found(program, plan):
    return difference(program, plan, torch.zeros(2, ROWS, 24), torch.arange(7), torch.zeros(2, 7, 24))


SAME = {
    "written": (written(100), written_otherwise),
    "seen": (SEEN, seen(lambda keys, position: keys < position + 65)),
    "read": (read(16), read_otherwise),
    "later keys": (LATER, FROM_ZERO),
    "later keys from zero": (FROM_ZERO, LATER),
}
OTHERS = {
    "written one further": (written(100), written(101)),
    "all seen": (SEEN, lambda cache, position, rows: attended(rows @ cache.mT, cache)),
    "one more seen": (SEEN, seen(lambda keys, position: keys <= position + 65)),
    "read from the start": (read(16), read(0)),
    "all later keys": (LATER, later()),
    "one later key less": (FROM_ZERO, later(lambda keys, position: keys < position - ROWS // 2, by_hand)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_places(name):
    """Raises UncheckedError if that cannot be found out."""
    assert found(*SAME[name]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_places(monkeypatch, name):
    monkeypatch.undo()  # a difference counts at a program's own sizes
    assert found(*OTHERS[name]) is not None


@pytest.mark.parametrize("view", [torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default], ids=str)
def test_views_of_an_input_in_another_layout(view):
    """At small sizes it is drawn in rows, and the view would be of another layout."""

    def viewed(x):
        return view(x.t(), [36 * 24])

    assert difference(viewed, lambda x: x.t().flatten(), torch.zeros(36, 24).t()) is None
