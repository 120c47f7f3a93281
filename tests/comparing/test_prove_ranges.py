"""The option prove near the ends of what dtypes hold: a plan that leaves a range is wrong where the program stays. The
same where one key has all the weight of a softmax, and where all keys are alike.

Programs and plans are functions of the same inputs, and small changes apart, all agree on numbers of about one."""

import pytest
import torch
from lib.faults import difference

HALF, WIDE, CODES = torch.float16, torch.float32, torch.int8
EPSILON = 1e-5


def of_matrices(program, plan, dtypes):
    return difference(program, plan, *(torch.ones(24, 24, dtype=dtype) for dtype in dtypes))


def quantised(x, step):
    return (x / step).round().clamp(-128, 127).to(CODES)


def by_parts(x, step):
    return (x * (1 / step)).round().clamp_max(127).clamp_min(-128).to(torch.int32).to(CODES)


def without_a_clamp(x, step):
    return (x / step).round().to(CODES)


def clamped_above_alone(x, step):
    return (x / step).round().clamp(max=127).to(CODES)


def clamped_at_both_ends_alike(x, step):
    return (x / step).round().clamp(-127, 127).to(CODES)


def clamped_after_the_cast(x, step):
    return without_a_clamp(x, step).clamp(-128, 127)


def negated(codes):
    return -codes.to(WIDE)


def negated_codes(codes):
    return (-codes).to(WIDE)


def scores(query, keys):
    return (query.float() @ keys.float()).softmax(-1).to(query.dtype)


def narrow_scores(query, keys):
    return (query @ keys).float().softmax(-1).to(query.dtype)


def shares(query, keys, total=lambda weights: weights.sum(-1, keepdim=True)):
    scores = (query @ keys) * 0.7
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / total(weights)


def shares_of_at_least_105(query, keys):
    return shares(query, keys, lambda weights: weights.sum(-1, keepdim=True).clamp(min=1.05))


def shares_but_of_alike_keys(query, keys):
    return shares(query, keys, lambda weights: weights.sum(-1, keepdim=True) + (weights.amin() - 0.5).relu())


def scaled_before(query, keys):
    return (query * 1e-3) @ keys


def scaled_after(query, keys):
    return (query @ keys) * 1e-3


def scaled_up_in_between(query, keys):
    return ((query * 64) @ keys) * (1e-3 / 64)


def norm(x):
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)


def narrow_norm(x):
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt()


def norm_of_a_square(x):
    wide = x.float()
    return (wide * (x.square().float().mean(-1, keepdim=True) + EPSILON).rsqrt()).to(x.dtype)


def average(x):
    return x.mean(-1)


def sum_by_count(x):
    return x.sum(-1) / x.shape[-1]


def doubled_and_halved(x):
    return (x + x).mean(-1) / 2


WRONG = [
    (quantised, without_a_clamp, (WIDE, WIDE)),
    (quantised, clamped_above_alone, (WIDE, WIDE)),
    (quantised, clamped_at_both_ends_alike, (WIDE, WIDE)),
    (quantised, clamped_after_the_cast, (WIDE, WIDE)),
    (quantised, without_a_clamp, (torch.bfloat16, torch.bfloat16)),
    (negated, negated_codes, (CODES,)),
    (scores, narrow_scores, (HALF, HALF)),
    (shares, shares_of_at_least_105, (WIDE, WIDE)),
    (shares, shares_but_of_alike_keys, (WIDE, WIDE)),
    (scaled_before, scaled_after, (HALF, HALF)),
    (scaled_before, scaled_up_in_between, (HALF, HALF)),
    (scaled_after, scaled_up_in_between, (HALF, HALF)),
    (norm, narrow_norm, (HALF,)),
    (norm, norm_of_a_square, (HALF,)),
    (average, sum_by_count, (HALF,)),
    (average, doubled_and_halved, (HALF,)),
]
RIGHT = [
    (shares, shares, (WIDE, WIDE)),
    (quantised, by_parts, (WIDE, WIDE)),
    (clamped_after_the_cast, without_a_clamp, (WIDE, WIDE)),
    (negated_codes, negated_codes, (CODES,)),
    (narrow_scores, scores, (HALF, HALF)),
    (scores, narrow_scores, (torch.bfloat16, torch.bfloat16)),
    (scaled_after, scaled_before, (HALF, HALF)),
    (scaled_before, scaled_after, (WIDE, WIDE)),
    (scaled_before, scaled_after, (torch.bfloat16, torch.bfloat16)),
    (narrow_norm, norm, (HALF,)),
    (norm, narrow_norm, (WIDE,)),
    (sum_by_count, average, (HALF,)),
]


def named(part):
    return part.__name__ if callable(part) else " ".join(str(dtype).removeprefix("torch.") for dtype in part)


@pytest.mark.parametrize(("program", "plan", "dtypes"), WRONG, ids=named)
def test_a_plan_that_leaves_a_range_is_refused(program, plan, dtypes):
    assert of_matrices(program, plan, dtypes) is not None


@pytest.mark.parametrize(("program", "plan", "dtypes"), RIGHT, ids=named)
def test_a_plan_that_stays_in_it_is_made(program, plan, dtypes):
    assert of_matrices(program, plan, dtypes) is None
