"""Masks that are declared causal on NPUs: results are NaN for each sequence whose mask is another one."""

import pytest
import torch
from mla_fx.lowering.ascend import causal_masks

S, T = 3, 8
LOWEST = torch.finfo(torch.bfloat16).min


def causal(length):
    """Row s of S sees the keys before length - S + 1 + s."""
    return torch.arange(T) < torch.arange(length - S + 1, length + 1)[:, None]


def changed(row, keys, sees):
    mask = causal(6).clone()
    mask[row, keys] = sees
    return mask


MASKS = {
    "the first keys are padding": (changed(slice(None), slice(0, 2), False), False),
    "a key in the middle is hidden": (changed(1, 2, False), False),
    "a key behind the last is seen": (changed(0, 7, True), False),
    "an early row sees as much as the last": (changed(0, 5, True), False),
    "nothing is hidden": (torch.ones(S, T, dtype=torch.bool), False),
    "all of the cache is filled": (causal(T), True),
    "a prompt": (causal(S), True),
    "first rows see nothing": (causal(1), True),
    "nothing is seen": (causal(0), True),
}


def is_nan(mask):
    lengths = causal_masks.lengths(mask)
    out = causal_masks.checked(torch.ones(2, S, 4, 16), mask, lengths)
    assert ((out == 1) | out.isnan()).all()
    return out.isnan().flatten(1).all(1).tolist()


@pytest.mark.parametrize("name", MASKS)
def test_a_sequence_is_compared_with_its_length(name):
    mask, is_causal = MASKS[name]
    both, expected = torch.stack((causal(5), mask))[:, None], [False, not is_causal]
    assert is_nan(both) == expected
    for hidden in (LOWEST, -torch.inf, -10000.0):
        assert is_nan(torch.zeros(both.shape, dtype=torch.bfloat16).masked_fill(~both, hidden)) == expected


def test_one_mask_for_all_sequences():
    assert is_nan(causal(5)) == is_nan(causal(5)[None, None]) == [False, False]
    assert is_nan(changed(1, 2, False)) == [True, True]


@pytest.mark.parametrize("bias", [-0.5, 0.5, -9.0, torch.inf, torch.nan])
def test_scores_that_are_changed_are_not_hidden(bias):
    mask = torch.zeros(2, 1, S, T).masked_fill(~causal(5), -torch.inf)
    mask[1, 0, 2, 1] = bias
    assert is_nan(mask) == [False, True]


def test_another_length_than_the_mask_has():
    """Where the kernel takes no fewer keys than queries, rows that see nothing would see some."""
    mask = causal(1)
    assert causal_masks.checked(torch.ones(1, S, 4, 16), mask, torch.tensor([S])).isnan().all()


def test_no_mask():
    out = torch.ones(1, S, 4, 16)
    assert causal_masks.checked(out, None, None) is out
