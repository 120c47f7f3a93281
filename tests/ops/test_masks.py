"""The masks of the two attentions over latents: what is filled, and rows that see nothing."""

import math

import pytest
import torch
from lib.attention_forms import FORMS, heads, latents

from mla_fx.ops.emitted.attention import samples

attend = torch.ops.mla_fx.attention


def attentions(mask):
    """Each operator and form: a function of options that attends with `mask`."""
    for form, options in ((latents, {}), (heads, {}), (heads, {"max_absorbed_tokens": 3})):
        own = form(torch.float64, 0) | options
        yield lambda own=own, **given: attend(**{**own, "mask": mask, "scale": 0.3, **given})[0]


@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float32).min])
def test_a_row_that_is_filled_throughout_sees_all_keys_alike(fill):
    """Its scores are equal, however low they are: the mean of the values, where minus infinity gives zeros."""
    for attend in attentions(torch.tensor([[True] * 5, [False] * 5, [True] * 5])):
        seeing_all_alike = attend(fill=0.0)
        torch.testing.assert_close(attend(fill=fill)[:, 1], seeing_all_alike[:, 1])
        assert not attend()[:, 1].any()


def test_where_some_keys_are_seen_a_low_fill_is_minus_infinity():
    for attend in attentions(torch.arange(5) <= torch.arange(3).unsqueeze(-1)):
        torch.testing.assert_close(attend(fill=-1e4), attend(), rtol=0, atol=0)


@pytest.mark.parametrize("fill", [-1e300, 1e300])
def test_a_fill_beyond_the_type_of_the_scores_is_the_nearest_number_that_it_has(fill):
    lowest = math.copysign(torch.finfo(torch.float32).max, fill)
    args = samples.sample(torch.float16, 0, 3, torch.tensor([[False] * 5, [False] * 4 + [True], [True] * 5]))
    torch.testing.assert_close(attend(*args, scale=0.3, fill=fill), attend(*args, scale=0.3, fill=lowest))


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_row_with_minus_infinity_added_to_every_score_gives_zeros(value):
    """NaN is no mask: it stays."""
    for attend in attentions(torch.tensor([[0.0] * 5, [value] * 5, [-math.inf] * 4 + [0.0]])):
        row = attend()[:, 1]
        assert not row.any() if value == -math.inf else row.isnan().all()


@pytest.mark.parametrize("lens", [[5, 3], [4], [1], [0], [-3, 9], [2**63 - 1]])
def test_context_lens_are_the_mask_that_they_say(lens):
    """Numbers beyond the ends of the cache and of int64 included: hiding is counted as the machine counts."""
    lens = torch.tensor(lens)
    visible = torch.arange(5) <= (lens - 3).view(-1, 1, 1, 1) + torch.arange(3).view(-1, 1)
    for by_mask, by_lens in zip(attentions(visible), attentions(None), strict=True):
        for options in ({}, {"fill": -1.5}):
            expected = by_mask(**options)
            torch.testing.assert_close(by_lens(context_lens=lens, **options), expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_before_the_first_key_gives_zeros_or_the_mean(form):
    given = {**form(torch.float64, 0), "scale": 0.3}
    rows, _ = attend(**given, context_lens=torch.tensor([2, 3]))
    assert [not row.any() for row in rows.flatten(0, 1)] == [True, False, False, False, False, False]
    filled, _ = attend(**given, context_lens=torch.tensor([2, 3]), fill=-1e4)
    alike, _ = attend(**given, mask=torch.zeros(3, 5).bool(), fill=0.0)
    torch.testing.assert_close(filled[0, 0], alike[0, 0])
