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


def written(cache, position, rows):
    return cache.index_copy(1, position + 100, rows)


def written_otherwise(cache, position, rows):
    return cache.index_put((torch.arange(2).unsqueeze(-1), position + 99 + 1), rows)


def written_one_further(cache, position, rows):
    return cache.index_copy(1, position + 101, rows)


def seen(cache, position, rows):
    mask = torch.arange(ROWS) <= position.unsqueeze(-1) + 64
    return (rows @ cache.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ cache


def seen_by_lengths(cache, position, rows):
    mask = torch.arange(ROWS) < position.unsqueeze(-1) + 65
    return (rows @ cache.mT).where(mask, -torch.inf).softmax(-1) @ cache


def all_seen(cache, position, rows):
    return (rows @ cache.mT).softmax(-1) @ cache


def one_more_seen(cache, position, rows):
    mask = torch.arange(ROWS) <= position.unsqueeze(-1) + 65
    return (rows @ cache.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ cache


def read(cache, position, rows):
    return cache.index_select(1, position + 16) * rows


def read_otherwise(cache, position, rows):
    return rows * cache[:, position + 16]


def read_from_the_start(cache, position, rows):
    return cache.index_select(1, position) * rows


def later_keys(cache, position, rows):
    """The second of two chunks, with its logarithm. A position before it sees no key."""
    keys, mask = cache[:, ROWS // 2 :], torch.arange(ROWS // 2, ROWS) <= position.unsqueeze(-1)
    scores = (rows @ keys.mT).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ keys).sum(-1) + scores.logsumexp(-1)


def later_keys_from_zero(cache, position, rows):
    keys, mask = cache[:, ROWS // 2 :], torch.arange(ROWS // 2) <= position.unsqueeze(-1) - ROWS // 2
    scores = torch.where(mask, rows @ keys.mT, -torch.inf)
    return (scores.softmax(-1) @ keys).sum(-1) + scores.exp().sum(-1).log()


def one_later_key_less(cache, position, rows):
    keys, mask = cache[:, ROWS // 2 :], torch.arange(ROWS // 2) < position.unsqueeze(-1) - ROWS // 2
    scores = torch.where(mask, rows @ keys.mT, -torch.inf)
    return (scores.softmax(-1) @ keys).sum(-1) + scores.exp().sum(-1).log()


def all_later_keys(cache, position, rows):
    keys = cache[:, ROWS // 2 :]
    scores = rows @ keys.mT
    return (scores.softmax(-1) @ keys).sum(-1) + scores.logsumexp(-1)


def found(program, plan):
    return difference(program, plan, torch.zeros(2, ROWS, 24), torch.arange(7), torch.zeros(2, 7, 24))


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (written, written_otherwise),
        (seen, seen_by_lengths),
        (read, read_otherwise),
        (later_keys, later_keys_from_zero),
        (later_keys_from_zero, later_keys),
    ],
)
def test_the_same_places(program, plan):
    """Raises UncheckedError if that cannot be found out."""
    assert found(program, plan) is None


@pytest.mark.parametrize(
    ("program", "plan"),
    [
        (written, written_one_further),
        (seen, all_seen),
        (seen, one_more_seen),
        (read, read_from_the_start),
        (later_keys, all_later_keys),
        (later_keys_from_zero, one_later_key_less),
    ],
)
def test_other_places(monkeypatch, program, plan):
    monkeypatch.undo()  # a difference counts at a program's own sizes
    assert found(program, plan) is not None


@pytest.mark.parametrize("view", [torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default], ids=str)
def test_views_of_an_input_in_another_layout(view):
    """At small sizes it is drawn in rows, and the view would be of another layout."""

    def viewed(x):
        return view(x.t(), [36 * 24])

    assert difference(viewed, lambda x: x.t().flatten(), torch.zeros(36, 24).t()) is None
