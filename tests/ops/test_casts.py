"""The vendor's roundings, bit by bit: against numpy in the same steps, and against exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from mla_fx.ops.common import cast as _cast

HALVES = torch.arange(65536).to(torch.uint16).view(torch.float16)
LARGEST = 65504.0


def floats():
    """All float16 values as float32, ties and their neighbours, values of every size, and what is no number."""
    ties = torch.arange(-300, 300).float() + 0.5
    random = torch.Generator().manual_seed(0)
    spread = torch.randn(20000, generator=random) * torch.logspace(-9, 6, 20000)
    near = torch.cat((ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)))
    # Around each tie, everything that float16 may round onto it.
    close = torch.cat([ties * (1 + k * 2**-13) for k in range(-9, 10)])
    rest = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e38, -1e38, 2.0**31, -(2.0**31), 1e-45, -1e-45])
    return torch.cat((HALVES.float(), near, close, spread, rest))


def half_away(x, step):
    """The multiple of `step` nearest to a Fraction, ties away from zero."""
    steps = math.floor(abs(x) / step + Fraction(1, 2))
    return steps * step if x >= 0 else -steps * step


def exact_half(x):
    """A float as the nearest float16, ties away from zero; by the definition of the format."""
    if not math.isfinite(x) or x == 0:
        return x
    exponent = math.frexp(x)[1]
    rounded = half_away(Fraction(x), Fraction(2) ** max(exponent - 11, -24))
    if abs(rounded) > LARGEST:
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


def saturated(x):
    """An integral float as int8."""
    if math.isnan(x):
        return 0
    return int(min(max(x, -128), 127))


def test_i8_trunc_is_rint_to_int32_then_float16_then_truncated():
    x = floats()
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.clip(np.nan_to_num(np.rint(x.double().numpy())), -(2**31), 2**31 - 1).astype(np.int32)
        half = whole.astype(np.float32).astype(np.float16)
        wanted = np.clip(np.trunc(np.nan_to_num(half.astype(np.float32))), -128, 127).astype(np.int8)
    assert np.array_equal(_cast.i8_trunc(x).numpy(), wanted)
    assert np.array_equal(_cast.i8_trunc(x.double()).numpy(), wanted)


def test_i8_half_round_rounds_twice_away_from_zero():
    x = floats()
    wanted = []
    for value in x.tolist():
        half = exact_half(value)
        wanted.append(saturated(half if not math.isfinite(half) else float(half_away(Fraction(half), 1))))
    assert _cast.i8_half_round(x).tolist() == wanted


def test_i8_half_rint_rounds_twice_to_even():
    x = floats()
    with np.errstate(over="ignore"):
        half = x.numpy().astype(np.float16).astype(np.float32)
    wanted = [saturated(value) for value in np.rint(half).tolist()]
    assert _cast.i8_half_rint(x).tolist() == wanted


@pytest.mark.parametrize(
    ("x", "trunc", "half_round", "half_rint"),
    [
        (0.5, 0, 1, 0),
        (1.5, 2, 2, 2),
        (2.5, 2, 3, 2),
        (-0.5, 0, -1, 0),
        (-2.5, -2, -3, -2),
        # float16 makes a tie of what is just short of one: 0.5 is the neighbour of 0.5 - 2^-12, 100.5 of 100.4375.
        (0.5 - 2**-13, 0, 1, 0),
        (0.5 - 2**-13 - 2**-25, 0, 0, 0),
        (100.46875, 100, 101, 100),
        (101.46875, 101, 102, 102),
        (100.53125, 101, 101, 100),
        (100.51, 101, 101, 100),
        (-100.46875, -100, -101, -100),
        (126.5, 126, 127, 126),
        (127.5, 127, 127, 127),
        (-128.5, -128, -128, -128),
        (-129.0, -128, -128, -128),
        (1e9, 127, 127, 127),
        (-1e9, -128, -128, -128),
        (math.inf, 127, 127, 127),
        (-math.inf, -128, -128, -128),
        (math.nan, 0, 0, 0),
    ],
)
def test_where_the_three_casts_differ(x, trunc, half_round, half_rint):
    value = torch.tensor([x])
    casts = (_cast.i8_trunc, _cast.i8_half_round, _cast.i8_half_rint)
    assert [int(cast(value)) for cast in casts] == [trunc, half_round, half_rint]


def test_double_rounding_moves_about_one_value_in_a_hundred_by_one():
    x = torch.randn(100000, generator=torch.Generator().manual_seed(0)) * 40
    twice, once = _cast.i8_half_round(x).int(), _cast.i8_trunc(x).int()
    assert (twice - once).abs().max() == 1
    assert 0.002 < (twice != once).double().mean() < 0.03


def test_float16_values_stay():
    for sign in (1, -1):
        x = sign * HALVES.float()
        same = _cast.float16_half_away(x)
        assert torch.equal(same.isnan(), x.isnan())
        assert torch.equal(same[~x.isnan()].view(torch.int32), x[~x.isnan()].view(torch.int32))


@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_of_all_float16_values_go_away_from_zero(sign):
    """And the float32 values beside a midpoint to their own side, subnormals and the step to infinity included."""
    values = HALVES[:0x7C00].float()
    beyond = torch.cat((values[1:], torch.tensor([65536.0])))
    middle = (values + beyond) / 2
    upper = torch.cat((values[1:], torch.tensor([torch.inf])))
    below, above = (torch.nextafter(middle, limit) for limit in (torch.zeros_like(middle), beyond))
    for x, wanted in ((middle, upper), (above, upper), (below, values)):
        assert torch.equal(_cast.float16_half_away(sign * x), sign * wanted)


def test_float16_half_away_of_float32_subnormals_and_signed_zeros():
    x = torch.tensor([1e-45, -1e-45, 1e-40, 0.0, -0.0, 2.0**-25, -(2.0**-25), 2.0**-26])
    wanted = torch.tensor([0.0, -0.0, 0.0, 0.0, -0.0, 2.0**-24, -(2.0**-24), 0.0])
    assert torch.equal(_cast.float16_half_away(x).view(torch.int32), wanted.view(torch.int32))


def test_float16_half_away_against_fractions():
    x = floats()
    x = x[~x.isnan()]
    assert _cast.float16_half_away(x).tolist() == [exact_half(value) for value in x.tolist()]


@pytest.mark.parametrize("inverse_first", [False, True])
def test_quantize_rows_in_float32(inverse_first):
    x = torch.randn(64, 7, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None, None]
    rows = x.numpy()
    largest = np.abs(rows).max(-1, keepdims=True)
    factor = np.float32(127) / largest
    integers, scale = _cast.quantize_rows(x, inverse_first)
    assert (integers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (64, 7, 1))
    assert np.array_equal(integers.numpy(), np.clip(np.rint(rows * factor), -128, 127).astype(np.int8))
    assert np.array_equal(scale.numpy(), np.float32(1) / factor if inverse_first else largest / np.float32(127))
    assert (integers.abs().amax(-1) == 127).all()
    # The two scales differ in the last bit of some rows: which is meant must be said.
    other = _cast.quantize_rows(x, not inverse_first)[1]
    assert not torch.equal(scale, other)
    torch.testing.assert_close(scale, other, rtol=3e-7, atol=0)


@pytest.mark.parametrize("inverse_first", [False, True])
def test_quantize_rows_of_zeros_nan_and_infinity(inverse_first):
    """One such row leaves the others alone."""
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 3] = -torch.inf
    x[3] = 1e-40  # its factor overflows
    integers, scale = _cast.quantize_rows(x, inverse_first)
    assert integers[:3].count_nonzero() == 0
    assert (integers[3] == 127).all()
    assert scale[0] == 0
    assert scale[1].isnan()
    assert scale[2] == torch.inf
    assert scale[3] == (0 if inverse_first else 1e-40 / 127)
    alone = _cast.quantize_rows(x[4:], inverse_first)
    assert torch.equal(integers[4:], alone[0])
    assert torch.equal(scale[4:], alone[1])


def test_quantize_rows_in_float64():
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    integers, scale = _cast.quantize_rows(x, False)
    assert scale.dtype == torch.float64
    assert ((integers * scale - x).abs() <= scale * 0.5000001).all()


EXTREMES = torch.tensor([127, -127, -128, 1, -1], dtype=torch.int8)


@pytest.mark.parametrize("inner", [1, 7, 1536, 7168])
def test_int_matmul_is_exact(inner):
    """Against int64; float32 holds integers below 2^24 and rounds the larger ones once, to even."""
    random = torch.Generator().manual_seed(inner)
    left, right = (EXTREMES[torch.randint(0, 5, shape, generator=random)] for shape in ((5, inner), (inner, 6)))
    for a, b in ((left, right), (torch.full_like(left, -128), torch.full_like(right, -128)), (left, right.abs())):
        wanted = a.numpy().astype(np.int64) @ b.numpy().astype(np.int64)
        assert np.array_equal(_cast.int_matmul(a, b).numpy(), wanted.astype(np.float32))


def test_int_matmul_rounds_one_sum_and_not_its_parts():
    """Sums in float32 would lose the ones that a sum beyond 2^24 meets."""
    inner = 7168
    left = torch.full((1, inner), -128, dtype=torch.int8)
    right = torch.full((inner, 1), -128, dtype=torch.int8)
    left[0, -3000:], right[-3000:] = 1, 1
    wanted = sum(a * b for a, b in zip(left[0].tolist(), right[:, 0].tolist(), strict=True))
    assert wanted == 4168 * 16384 + 3000
    assert float(_cast.int_matmul(left, right)) == np.float32(wanted)


def test_int_matmul_in_batches():
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-128, 128, (3, 4, 4), generator=random).to(torch.int8) for _ in range(2))
    assert torch.equal(_cast.int_matmul(left, right), (left.long() @ right.long()).float())
