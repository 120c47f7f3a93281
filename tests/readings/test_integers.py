"""Whole numbers that a program rounds, clamps and casts, in every order, against what it computes."""

import math

import pytest
import torch
from lib.traced import Traced

from mla_fx.errors import NoMatch
from mla_fx.readings.bounds import Bounds
from mla_fx.readings.codes.products import quantised_product
from mla_fx.readings.codes.whole_numbers import check_codes, whole_numbers
from mla_fx.readings.element import resolve
from mla_fx.readings.integers import whole_number
from mla_fx.readings.views import fresh_index

VALUES = torch.arange(-70000.0, 70000.0, 7.3)
EVERY = (-math.inf, math.inf)
IN_INT8 = (-128, 127)

# what casts keep on the way, and the program
CHAINS = {
    "rounded": (EVERY, lambda x: x.round()),
    "clamped, then cast": (EVERY, lambda x: x.round().clamp(-128, 127).to(torch.int8)),
    "clamped before it is rounded": (EVERY, lambda x: x.clamp(-127, 127).round().to(torch.int8)),
    "in two steps": (EVERY, lambda x: x.round().clamp_min(-128).clamp_max(127).to(torch.int8)),
    "cast, then clamped": (IN_INT8, lambda x: x.round().to(torch.int8).clamp(-128, 127)),
    "cast alone": (IN_INT8, lambda x: x.round().to(torch.int8)),
    "clamped from above alone": ((-128, math.inf), lambda x: x.round().clamp_max(100).to(torch.int8)),
    "clamped too far out": (IN_INT8, lambda x: x.clamp(-300, 300).round().to(torch.int8).clamp(-128, 127)),
    "int16 between": ((-(2**15), 2**15 - 1), lambda x: x.round().to(torch.int16).clamp(-128, 127).to(torch.int8)),
    "int16 that holds it": (EVERY, lambda x: x.round().clamp(-9e3, 9e3).to(torch.int16).clamp(-128, 127).char()),
    "float16 between, which is infinite": (EVERY, lambda x: x.round().half().clamp(-128, 127).to(torch.int8)),
    "float16 before an integer": ((-2048, 2048), lambda x: x.round().half().to(torch.int32).clamp(-128, 127)),
    "clamped in turn": (EVERY, lambda x: x.round().clamp(-300, -50).clamp(-128, 127)),
    "the last bound counts": (EVERY, lambda x: x.round().clamp(-128, 127).clamp_min(300)),
    "bounds that cross": (EVERY, lambda x: x.round().clamp(100, -100)),
}


def read(function):
    traced = Traced(function, VALUES)
    return traced, whole_numbers(resolve(traced.out, fresh_index(traced.out)))


@pytest.mark.parametrize("name", CHAINS)
def test_bounds_and_what_casts_keep(name):
    held, function = CHAINS[name]
    traced, found = read(function)
    bounds = found.bounded(Bounds(*held))
    rounded = VALUES.round()
    kept = (rounded >= held[0]) & (rounded <= held[1])
    assert traced.values[traced.out][kept].tolist() == rounded[kept].clamp(*bounds).tolist()


@pytest.mark.parametrize("name", [name for name, (held, _) in CHAINS.items() if held != EVERY])
def test_numbers_that_are_not_held_wrap(name):
    _, found = read(CHAINS[name][1])
    with pytest.raises(NoMatch, match="codes from -inf to inf are cast to integers and not clamped before, so"):
        found.bounded(Bounds())


EXPECTED = "expected codes rounded to the nearest whole number"
OTHERS = {
    "a bound between": ("values that round to -128 have the code -127.5", lambda x: x.round().clamp(-127.5, 127.5)),
    "a zero point": ("the codes have a zero point", lambda x: (x.round() + 1).clamp(-128, 127)),
    "in float8": ("values that round to 17 have the code 16", lambda x: x.clamp(0, 20).round().to(torch.float8_e4m3fn)),
    "doubled": (f"{EXPECTED}, found mul", lambda x: (x.round() * 2).clamp(max=127)),
    "truncated": (f"{EXPECTED}, found sin", lambda x: x.sin().to(torch.int8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_codes_that_are_no_whole_numbers(name):
    reason, function = OTHERS[name]
    with pytest.raises(NoMatch, match=reason):
        read(function)[1].bounded(Bounds())


@pytest.mark.parametrize("name", ["the last bound counts", "rounded"])
def test_codes_that_int8_does_not_hold(name):
    traced = Traced(CHAINS[name][1], VALUES)
    with pytest.raises(NoMatch, match="not clamped to the range of int8"):
        check_codes(resolve(traced.out, fresh_index(traced.out)))


# --- products of codes -----------------------------------------------------------------------------------------------


def multiplied(dtype, terms, rounded):
    """A product of codes in floats that is cast to integers, times scales."""
    codes = torch.randint(-128, 128, (2, terms), generator=torch.Generator().manual_seed(0)).to(torch.int8)

    def scaled(x, w, scales):
        product = x.to(dtype) @ w.to(dtype).t()
        return product.to(rounded).to(torch.int32) * scales

    traced = Traced(scaled, codes, codes, torch.ones(2))
    return quantised_product(resolve(traced.out, fresh_index(traced.out)))


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ROUNDED = [(F32, F32, 1024), (F64, F32, 1024), (BF16, BF16, 0), (F32, BF16, 0)]


@pytest.mark.parametrize(("dtype", "terms"), [(F32, 1024), (F64, 2**16)])
def test_sums_of_codes_that_floats_hold(dtype, terms):
    found = multiplied(dtype, terms, dtype)
    assert [side.origin.meta["val"].dtype for side in (found.left, found.right)] == [torch.int8] * 2
    assert found.factor == 1.0


@pytest.mark.parametrize(("dtype", "rounded", "most"), ROUNDED)
def test_sums_of_codes_that_are_rounded(dtype, rounded, most):
    with pytest.raises(NoMatch, match=f"a product of 1025 codes is rounded to {rounded}, exact for up to {most}"):
        multiplied(dtype, 1025, rounded)


@pytest.mark.parametrize(("number", "whole"), [(3, 3), (3.0, 3), (2.5, None), (2.0**53, None), (None, None)])
def test_numbers_that_are_no_whole_ones(number, whole):
    assert whole_number(number) == whole
