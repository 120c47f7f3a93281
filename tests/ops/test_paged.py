"""The parts that operators over paged caches have in common, against one row at a time in float64."""

import math

import numpy as np
import pytest
import torch

from mla_fx.ops.common.paged import gather_rows, host_lengths, int8_product, online_softmax, rounded_product, row_index

WIDTHS = (4, 4, 3)


def drawn(dtype=torch.float64, rows=5, width=11, values=6):
    generator = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(2, 3, rows, width, generator=generator, dtype=torch.float64)
    return scores.to(dtype), torch.randn(2, 3, width, values, generator=generator, dtype=torch.float64).to(dtype)


def tiled(scores, values):
    return zip(scores.split(WIDTHS, -1), values.split(WIDTHS, -2), strict=True)


def run(scores, values, product=None):
    like = values.new_empty(*scores.shape[:-1], values.shape[-1])
    return online_softmax(tiled(scores, values), product or rounded_product(scores.dtype), like)


def plain_softmax(scores, values):
    """One row: the weighted sum of the values, and the logarithm of the sum of exponentials."""
    if all(score == -math.inf for score in scores):
        return np.zeros(values.shape[1]), -math.inf
    if any(math.isnan(score) or score == math.inf for score in scores):
        return np.full(values.shape[1], math.nan), math.nan
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    out = sum(weight * row for weight, row in zip(weights, values, strict=True)) / sum(weights)
    return out, math.log(sum(weights)) + largest


def compare(scores, values, rtol):
    out, logarithm = run(scores, values)
    for place in np.ndindex(scores.shape[:-1]):
        wanted, wanted_log = plain_softmax(scores[place].tolist(), values[place[:2]].double().numpy())
        np.testing.assert_allclose(out[place].double().numpy(), wanted, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(float(logarithm[place]), wanted_log, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_tiles_add_up_to_one_softmax(dtype, rtol):
    compare(*drawn(dtype), rtol)


def test_rows_that_see_nothing_or_little():
    scores, values = drawn()
    scores[0, 0, 0] = -math.inf
    scores[0, 0, 1, :4] = -math.inf
    scores[0, 0, 2, 4:] = -math.inf
    scores[0, 1, :, :] = -math.inf
    scores[1, 0, 3, 1:] = -math.inf
    compare(scores, values, 1e-13)
    out, logarithm = run(scores, values)
    assert (out[0, 0, 0] == 0).all()
    assert float(logarithm[0, 0, 0]) == -math.inf


@pytest.mark.parametrize("place", [0, 5, 10])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_scores_spoil_their_own_row_only(value, place):
    scores, values = drawn()
    scores[1, 2, 3, place] = value
    compare(scores, values, 1e-13)


def test_huge_scores_neither_overflow_nor_vanish():
    scores, values = drawn()
    scores[..., 0] += 1e4
    scores[0, ..., 9] += 1e5
    compare(scores, values, 1e-13)
    compare(scores - 1e6, values, 1e-10)


def test_no_tiles_is_seeing_nothing():
    out, logarithm = online_softmax(iter(()), rounded_product(torch.float32), torch.empty(1, 2, 3))
    assert out.tolist() == [[[0.0] * 3] * 2]
    assert logarithm.tolist() == [[[-math.inf]] * 2]


def test_weights_are_rounded_before_the_product_and_not_in_their_sum():
    """With one-hot values each result is one rounded weight over the sum of the unrounded ones."""
    scores, _ = drawn(torch.float32, rows=1, width=4)
    like = torch.empty(2, 3, 1, 4)
    out, _ = online_softmax([(scores, torch.eye(4).expand(2, 3, 4, 4))], rounded_product(torch.bfloat16), like)
    for place in np.ndindex(2, 3):
        row = scores[place][0]
        weights = torch.exp(row - row.max())
        wanted = [float(weight.bfloat16()) / float(weights.double().sum()) for weight in weights]
        np.testing.assert_allclose(out[place][0].tolist(), wanted, rtol=2**-22)
        assert not np.allclose(out[place][0].tolist(), row.double().softmax(-1).tolist(), rtol=2**-12)


def test_int8_weights_take_the_largest_of_their_tile_as_127():
    """The rounding of each weight, to float16 and then to int8, ties to even, written again in numpy."""
    scores, values = drawn(torch.float32)
    values = (values * 40).round().clamp(-128, 127)
    descale = torch.tensor([[0.5], [0.25], [2.0], [1.0], [0.125]])
    scores[0, 0, 0, :4] = -math.inf
    scores[0, 0, 1] = -math.inf
    out, _ = run(scores, values, int8_product(descale))
    for *group, row in np.ndindex(2, 3, 5):
        total, weight, largest = np.zeros(6), 0.0, -math.inf
        for tile, held in tiled(scores, values):
            s = tile[(*group, row)].numpy()
            if s.max() == -np.inf:
                continue
            previous, largest = largest, max(largest, float(s.max()))
            p = np.exp(s - np.float32(largest))
            scale = np.exp(np.float32(s.max() - np.float32(largest))) / np.float32(127)
            p8 = np.rint((p / scale).astype(np.float16)).astype(np.int64)
            assert p8.max() == 127
            integers = p8 @ held[tuple(group)].numpy().astype(np.int64)
            total = total * math.exp(previous - largest) + integers * float(descale[row]) * float(scale)
            weight = weight * math.exp(previous - largest) + float(p.astype(np.float64).sum())
        wanted = total / weight if weight else total
        np.testing.assert_allclose(out[(*group, row)].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_row_index():
    index, present = row_index(torch.tensor([2, 0, 3]))
    assert index.tolist() == [[0, 1, 0], [0, 0, 0], [2, 3, 4]]
    assert present.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    index, present = row_index(torch.empty(0, dtype=torch.int64))
    assert index.shape == present.shape == (0, 0)


def test_gather_rows():
    cache = torch.arange(4 * 2 * 3).view(4, 2, 3)
    tables = torch.tensor([[2, 0], [3, -1]], dtype=torch.int32)
    rows = gather_rows(cache, tables, torch.arange(4))
    assert rows.shape == (2, 4, 3)
    assert (rows[0] == torch.cat([cache[2], cache[0]])).all()
    assert (rows[1, :2] == cache[3]).all()


@pytest.mark.parametrize("entry", [-1, -(2**31), 4, 2**31 - 1])
def test_gather_rows_reads_something_for_entries_and_positions_that_do_not_exist(entry):
    cache = torch.arange(4 * 2 * 3).view(4, 2, 3)
    rows = gather_rows(cache, torch.tensor([[1, entry]], dtype=torch.int32), torch.tensor([1, 2, 7]))
    assert (rows[0, 0] == cache[1, 1]).all()
    assert rows.shape == (1, 3, 3)


def test_host_lengths_are_int64_on_the_cpu():
    lengths = host_lengths(torch.tensor([1, 2], dtype=torch.int32))
    assert (lengths.dtype, lengths.device.type, lengths.tolist()) == (torch.int64, "cpu", [1, 2])
