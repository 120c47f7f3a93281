"""Which masks hide all keys but chosen ones, and which near twins do not."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import fresh
from mla_fx.readings.selection import NONE, choices, selection

QUERIES, KEYS, CHOSEN = 2, 12, 3
LOWEST = torch.finfo(torch.float32).min


def chosen(scores):
    return scores.topk(CHOSEN, dim=-1).indices


def filled(number, like):
    return torch.full_like(like, number, dtype=torch.bool)


def shown(scores):
    return filled(False, scores).scatter_(-1, chosen(scores).int().long(), True)


def numbers(scores, number=-torch.inf, shown=0.0):
    return torch.full_like(scores, number).scatter(-1, chosen(scores), shown)


def of_flags(scores):
    found = scores.topk(CHOSEN)
    return filled(False, scores).scatter(-1, found.indices, found.values > 0)


# The mask, and how many other masks there are.
ACCEPTED = {
    "hidden": (lambda s: ~filled(True, s).scatter(-1, chosen(s), False), 0),
    "shown": (shown, 0),
    "shown beside a condition": (
        lambda s: (torch.arange(KEYS) <= torch.arange(QUERIES).unsqueeze(-1) + 8) & shown(s), 1,
    ),
    "neither hidden": (lambda s: ~(filled(True, s).scatter(-1, chosen(s), False) | (s > 1)), 1),
    "numbers": (lambda s: numbers(s), 0),
    "where shown": (lambda s: torch.where(shown(s), s, -torch.inf), 1),
    "filled where hidden": (lambda s: s.masked_fill(~shown(s), -torch.inf), 1),
    "of unsorted": (lambda s: filled(False, s).scatter(-1, s.topk(CHOSEN, -1, True, False)[1], True), 0),
    "added to numbers": (lambda s: numbers(s) + s.sin(), 1),
    "other numbers": (lambda s: numbers(s, shown=0.5), 1),
    "of ones": (lambda s: filled(False, s).scatter(-1, chosen(s), torch.ones_like(chosen(s), dtype=torch.bool)), 0),
    "of scores": (lambda s: numbers(s, shown=s), 1),
    "of flags": (of_flags, 1),
    "the lowest": (lambda s: numbers(s, LOWEST), 0),
    "where lowest": (lambda s: torch.where(shown(s), 0.0, LOWEST), 0),
}


def shown_later(scores):
    mask = shown(scores)
    mask[..., -1] = True
    return mask


def cut_off(scores):
    """What is chosen may be behind the keys."""
    wide = torch.cat((scores, scores + 1), dim=-1)
    return filled(False, wide).scatter(-1, chosen(wide), True)[..., :KEYS]


OTHERS = "does not hide the keys that were not chosen"
NO_TOPK = "is not the indices of a top-k, so it may name a key twice"
OTHER_THINGS = "the top-k chooses among other things than keys"
REFUSED = {
    "the contrary": (lambda s: ~shown(s), OTHERS),
    "or another condition": (lambda s: shown(s) | (s > 1), NONE),
    "finite": (lambda s: numbers(s, -1e4), OTHERS),
    "a condition as numbers": (lambda s: torch.where(shown(s), 0.0, -1e4), NONE),
    "where NaN": (lambda s: torch.where(shown(s), 0.0, torch.nan), NONE),
    "of NaN": (lambda s: numbers(s, torch.nan), OTHERS),
    "named twice": (lambda s: filled(False, s).scatter(-1, chosen(s) // 2, True), NO_TOPK),
    "shown later": (shown_later, NONE),
    "of half the keys": (lambda s: filled(False, s).scatter(-1, chosen(s[..., : KEYS // 2]), True), OTHER_THINGS),
    "along the queries": (
        lambda s: filled(False, s).scatter(0, s.topk(1, dim=0).indices, True), "does not write along the keys",
    ),
    "of the first query": (
        lambda s: filled(False, s).scatter(-1, chosen(s)[:1], True), "writes for some of the queries",
    ),
    "in another place": (lambda s: filled(False, s).scatter(-1, chosen(s), True).roll(1, -1), NONE),
    "cut off": (cut_off, OTHER_THINGS),
    "of indices from outside": (lambda s: filled(False, s).scatter(-1, s[..., :CHOSEN].long(), True), NO_TOPK),
    "at least the last, so equal scores show more keys": (lambda s: s >= s.topk(CHOSEN).values[..., -1:], NONE),
    "not of numbers: true where there is minus infinity": (lambda s: ~numbers(s).logical_not(), OTHERS),
    "and numbers": (lambda s: numbers(s).logical_and(filled(True, s)), NONE),
    "values": (lambda s: filled(False, s).scatter(-1, s.topk(CHOSEN)[0].long().clamp(0, 5), True), NO_TOPK),
}


def read(mask_of):
    """The graph of a mask [S, T], and the mask."""
    traced = make_fx(torch.func.functionalize(mask_of), tracing_mode="fake")(torch.randn(QUERIES, KEYS))
    mask = traced.graph.output_node().args[0]
    return selection(mask, tuple(map(fresh, (1, 1, QUERIES, KEYS)))), mask


@pytest.mark.parametrize(("mask_of", "others"), ACCEPTED.values(), ids=ACCEPTED)
def test_the_chosen_keys_are_read(mask_of, others):
    found, mask = read(mask_of)
    assert found.count == CHOSEN
    assert found.numbers.origin.args[0] in choices(mask)
    assert len(found.masks) == others
    scores = torch.randn(QUERIES, KEYS)
    mask = mask_of(scores)
    is_seen = mask if mask.dtype == torch.bool else mask > LOWEST
    is_chosen = scores.unsqueeze(-1) < scores.unsqueeze(-2)  # by fewer than so many keys that are larger
    assert not (is_seen & (is_chosen.sum(-1) >= CHOSEN)).any()


@pytest.mark.parametrize("name", ["the lowest", "where lowest"])
def test_the_lowest_number_is_known(name):
    assert read(ACCEPTED[name][0])[0].fill == LOWEST
    assert read(shown)[0].fill == -torch.inf


@pytest.mark.parametrize(("mask_of", "because"), REFUSED.values(), ids=REFUSED)
def test_twins_are_refused(mask_of, because):
    with pytest.raises(NoMatch, match=because):
        read(mask_of)
