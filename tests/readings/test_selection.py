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


def hidden(scores):
    return ~filled(True, scores).scatter(-1, chosen(scores), False)


def shown(scores):
    return filled(False, scores).scatter_(-1, chosen(scores).int().long(), True)


def shown_beside_a_condition(scores):
    return (torch.arange(KEYS) <= torch.arange(QUERIES).unsqueeze(-1) + 8) & shown(scores)


def neither_hidden(scores):
    return ~(filled(True, scores).scatter(-1, chosen(scores), False) | (scores > 1))


def numbers(scores):
    return torch.full_like(scores, -torch.inf).scatter(-1, chosen(scores), 0.0)


def where_shown(scores):
    return torch.where(shown(scores), scores, -torch.inf)


def filled_where_hidden(scores):
    return scores.masked_fill(~shown(scores), -torch.inf)


def of_unsorted(scores):
    return filled(False, scores).scatter(-1, scores.topk(CHOSEN, -1, True, False)[1], True)


def added_to_numbers(scores):
    return numbers(scores) + scores.sin()


def other_numbers(scores):
    return torch.full_like(scores, -torch.inf).scatter(-1, chosen(scores), 0.5)


def of_ones(scores):
    indices = chosen(scores)
    return filled(False, scores).scatter(-1, indices, torch.ones_like(indices, dtype=torch.bool))


def of_scores(scores):
    return torch.full_like(scores, -torch.inf).scatter(-1, chosen(scores), scores)


def of_flags(scores):
    found = scores.topk(CHOSEN)
    return filled(False, scores).scatter(-1, found.indices, found.values > 0)


def the_lowest(scores):
    return torch.full_like(scores, LOWEST).scatter(-1, chosen(scores), 0.0)


def where_lowest(scores):
    return torch.where(shown(scores), 0.0, LOWEST)


# How many other masks there are.
ACCEPTED = {
    hidden: 0,
    shown: 0,
    shown_beside_a_condition: 1,
    neither_hidden: 1,
    numbers: 0,
    where_shown: 1,
    filled_where_hidden: 1,
    of_unsorted: 0,
    added_to_numbers: 1,
    other_numbers: 1,
    of_ones: 0,
    of_scores: 1,
    of_flags: 1,
    the_lowest: 0,
    where_lowest: 0,
}


def the_contrary(scores):
    return ~shown(scores)


def or_another_condition(scores):
    return shown(scores) | (scores > 1)


def finite(scores):
    return torch.full_like(scores, -1e4).scatter(-1, chosen(scores), 0.0)


def a_condition_as_numbers(scores):
    return torch.where(shown(scores), 0.0, -1e4)


def where_nan(scores):
    return torch.where(shown(scores), 0.0, torch.nan)


def of_nan(scores):
    return torch.full_like(scores, torch.nan).scatter(-1, chosen(scores), 0.0)


def named_twice(scores):
    return filled(False, scores).scatter(-1, chosen(scores) // 2, True)


def shown_later(scores):
    mask = shown(scores)
    mask[..., -1] = True
    return mask


def of_half_the_keys(scores):
    return filled(False, scores).scatter(-1, chosen(scores[..., : KEYS // 2]), True)


def along_the_queries(scores):
    return filled(False, scores).scatter(0, scores.topk(1, dim=0).indices, True)


def of_the_first_query(scores):
    return filled(False, scores).scatter(-1, chosen(scores)[:1], True)


def in_another_place(scores):
    return filled(False, scores).scatter(-1, chosen(scores), True).roll(1, -1)


def values(scores):
    return filled(False, scores).scatter(-1, scores.topk(CHOSEN)[0].long().clamp(0, 5), True)


def cut_off(scores):
    """What is chosen may be behind the keys."""
    wide = torch.cat((scores, scores + 1), dim=-1)
    return filled(False, wide).scatter(-1, chosen(wide), True)[..., :KEYS]


def of_indices_from_outside(scores):
    return filled(False, scores).scatter(-1, scores[..., :CHOSEN].long(), True)


def at_least_the_last(scores):
    """Equal scores show more keys."""
    return scores >= scores.topk(CHOSEN).values[..., -1:]


def not_of_numbers(scores):
    """True where there is minus infinity."""
    return ~numbers(scores).logical_not()


def and_numbers(scores):
    return numbers(scores).logical_and(filled(True, scores))


REFUSED = {
    the_contrary: "does not hide the keys that were not chosen",
    or_another_condition: NONE,
    finite: "does not hide the keys that were not chosen",
    a_condition_as_numbers: NONE,
    where_nan: NONE,
    of_nan: "does not hide the keys that were not chosen",
    named_twice: "is not the indices of a top-k, so it may name a key twice",
    shown_later: NONE,
    of_half_the_keys: "the top-k chooses among other things than keys",
    along_the_queries: "does not write along the keys",
    of_the_first_query: "writes for some of the queries",
    in_another_place: NONE,
    cut_off: "the top-k chooses among other things than keys",
    of_indices_from_outside: "is not the indices of a top-k, so it may name a key twice",
    at_least_the_last: NONE,
    not_of_numbers: "does not hide the keys that were not chosen",
    and_numbers: NONE,
    values: "is not the indices of a top-k, so it may name a key twice",
}


def read(mask_of):
    """The graph of a mask [S, T], and the mask."""
    traced = make_fx(torch.func.functionalize(mask_of), tracing_mode="fake")(torch.randn(QUERIES, KEYS))
    mask = traced.graph.output_node().args[0]
    return selection(mask, tuple(map(fresh, (1, 1, QUERIES, KEYS)))), mask


@pytest.mark.parametrize("mask_of", ACCEPTED)
def test_the_chosen_keys_are_read(mask_of):
    found, mask = read(mask_of)
    assert found.count == CHOSEN
    assert found.numbers.origin.args[0] in choices(mask)
    assert len(found.masks) == ACCEPTED[mask_of]


@pytest.mark.parametrize("mask_of", ACCEPTED)
def test_only_chosen_keys_are_seen(mask_of):
    scores = torch.randn(QUERIES, KEYS)
    mask = mask_of(scores)
    is_seen = mask if mask.dtype == torch.bool else mask > LOWEST
    is_chosen = scores.unsqueeze(-1) < scores.unsqueeze(-2)  # by fewer than so many keys that are larger
    assert not (is_seen & (is_chosen.sum(-1) >= CHOSEN)).any()


@pytest.mark.parametrize("mask_of", [the_lowest, where_lowest])
def test_the_lowest_number_is_known(mask_of):
    assert read(mask_of)[0].fill == LOWEST
    assert read(shown)[0].fill == -torch.inf


@pytest.mark.parametrize("mask_of", REFUSED)
def test_twins_are_refused(mask_of):
    with pytest.raises(NoMatch, match=REFUSED[mask_of]):
        read(mask_of)
