"""Tokens quantised in many spellings; and near twins, with the reason for each."""

import math
from dataclasses import replace

import pytest
import torch
from lib.traced import Traced, dense, refused

from mla_fx.readings.codes.tokens import quantised_tokens
from mla_fx.readings.element import Scales, operand, resolve
from mla_fx.readings.views import fresh_index

X = dense(3, 5, 48)
ZERO, HALF = torch.zeros(()), torch.full((), 0.5)


def largest(x):
    return x.abs().amax(-1, keepdim=True)


def steps(x):
    return x * 127 / largest(x)


def scaled(x):
    return largest(x) / 127


def bounded_scale(x):
    return -(-scaled(x)).clamp_min(-0.01)


def ends(x):
    return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)


def from_ends(join):
    """Codes and scales by a function of the smallest and the largest of a row."""

    def quantise(x):
        by = join(*ends(x))
        return (x * 127 / by).round(), by / 127

    return quantise


def clipped_to(part):
    def quantise(x):
        bound = largest(x) * part
        return (x.clamp(-bound, bound) * 127 / bound).round(), bound / 127

    return quantise


SPELLINGS = {
    "divided": lambda x: ((x / scaled(x)).round().to(torch.int8), scaled(x)),
    "with its place": lambda x: ((x * 127 / x.abs().max(-1, keepdim=True).values).round(), scaled(x)),
    "a norm": lambda x: ((x * 127 / torch.linalg.vector_norm(x, math.inf, -1, keepdim=True)).round(), scaled(x)),
    "both ends": from_ends(lambda low, high: torch.maximum(-low, high)),
    "both ends, bounded by zero": from_ends(lambda low, high: torch.maximum(-low.minimum(ZERO), high.maximum(ZERO))),
    "magnitudes of ends": from_ends(lambda low, high: torch.maximum(low.abs(), high.abs())),
    "a share first": lambda x: ((x / largest(x) * 127).round(), scaled(x)),
    "of a part of the value": lambda x: ((x / largest(x / 127)).round(), largest(x / 127)),
    "numbers that cancel": lambda x: ((x * 2 / largest(x) * 63.5).round(), largest(x) * 0.5 / 63.5),
    "clipped to all of it": clipped_to(1.0),
    "a bound of zero": lambda x: ((x / scaled(x).clamp(min=0)).round(), scaled(x).abs()),
    "an offset that cancels": lambda x: ((steps(x) + 128).round().clamp(0, 255) - 128, scaled(x)),
    "NaN of zeros is zero": lambda x: (steps(x).nan_to_num(0.0).round().to(torch.int8), scaled(x)),
    "a mean of two": lambda x: (torch.lerp(steps(x), x / scaled(x), HALF).round(), scaled(x)),
}


def read(quantise, x=X):
    """The codes and their scales in a graph, and the place of the codes."""
    traced = Traced(quantise, x, decompose=False)
    codes, *scales = traced.out
    index = fresh_index(codes)
    by = tuple(operand(scale, index) for scale in scales)
    return traced, index, replace(resolve(codes, index), scales=Scales(by, torch.float32))


@pytest.mark.parametrize("name", SPELLINGS)
def test_tokens_are_read(name):
    """A code is no further than half a step from the value that was read, and the largest code is 127."""
    traced, index, element = read(SPELLINGS[name])
    found = quantised_tokens(element)
    assert found.differences == () and found.over == index[-1:]
    codes, value = traced.values[traced.out[0]].double(), traced.read(found.value, *index).double()
    wanted = value * 127 / value.abs().amax(-1, keepdim=True)
    assert ((codes - wanted).abs() <= 0.5001).all() and (codes.abs().amax(-1) == 127).all()
    torch.testing.assert_close(traced.values[traced.out[1]].double() * 127, value.abs().amax(-1, keepdim=True))


def test_several_scales_are_one():
    """Codes may be multiplied by one scale after another."""

    def by(number):
        return lambda x: (steps(x).round(), largest(x), torch.full((3, 5, 1), number))

    assert math.isclose(quantised_tokens(read(by(1 / 127))[2]).value.factor, 1.0, rel_tol=1e-6)
    assert math.isclose(quantised_tokens(read(by(1 / 100))[2]).value.factor, 1.27, rel_tol=1e-6)
    with refused(SCALE):
        quantised_tokens(read(lambda x: (steps(x).round(), largest(x), largest(x) / 127))[2])


DIFFERENCES = {
    "a guard": (lambda x: ((x / scaled(x).clamp_min(1e-3)).round(), scaled(x).clamp_min(1e-3)), ["0.127 at least"]),
    "a guard of codes": (lambda x: ((x * 127 / largest(x).clamp(min=1e-7)).round(), scaled(x)), ["1e-07 at least"]),
    "the least number": (lambda x: ((x / scaled(x).clamp(min=1e-38)).round(), scaled(x)), ["1.27e-36 at least"]),
    "half a step more": (
        lambda x: ((x * 127.5 / largest(x)).round().clamp(-128, 127), largest(x) / 127.5),
        ["the largest code of a token is 127.5, of a kernel 127"],
    ),
    "in 16 bits": (lambda x: (steps(x.half()).round(), scaled(x.half())), ["codes of tokens are", "scales of tokens"]),
    "rounded before": (lambda x: ((x.half().float() * 127 / largest(x)).round(), scaled(x)), ["in torch.float16"]),
    "an offset in 16 bits": (
        lambda x: ((steps(x).bfloat16() + 128).float().round() - 128, scaled(x)),
        ["in torch.bfloat16"],
    ),
    "beyond the range": (
        lambda x: ((x * 2.0**80 / largest(x) * (127 / 2.0**80)).round(), scaled(x)),
        ["codes or scales of tokens lose digits that they have in torch.float32"],
    ),
    "an offset that takes digits": (
        lambda x: ((steps(x) + 2**20).round() - 2**20, scaled(x)),
        ["codes or scales of tokens lose digits that they have in torch.float32"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_from_a_kernel(name):
    quantise, wanted = DIFFERENCES[name]
    found = quantised_tokens(read(quantise)[2])
    assert len(found.differences) == len(wanted)
    assert all(part in said for part, said in zip(wanted, found.differences, strict=True)), found.differences


VALUES = "the codes of tokens are not a number of steps times value / largest magnitude"
SCALE = "the codes of tokens are multiplied by a scale that they were not divided by"
SHIFTED = "{} is added to codes before they are rounded, expected an even number"
INFINITE = "tokens whose largest value is inf are quantised otherwise than others"
TWINS = {
    "without sign": (VALUES, lambda x: ((x * 127 / x.amax(-1, keepdim=True)).round(), x.amax(-1, keepdim=True) / 127)),
    "the smaller end": (VALUES, from_ends(lambda low, high: torch.minimum(-low, high))),
    "ends of two values": (VALUES, from_ends(lambda low, high: torch.maximum(-low, 2 * high))),
    "of other values": (VALUES, lambda x: ((x * 127 / largest(x + 1)).round(), largest(x + 1) / 127)),
    "an added guard": (VALUES, lambda x: ((x * 127 / (largest(x) + 1e-6)).round(), (largest(x) + 1e-6) / 127)),
    "a guard from above": (VALUES, lambda x: ((x * 127 / largest(x).clamp(max=10)).round(), scaled(x))),
    "of another token": (SCALE, lambda x: (steps(x).round()[1:], scaled(x)[:-1])),
    "of all tokens": (SCALE, lambda x: (steps(x).round(), x.abs().amax() / 127)),
    "of the sum": (SCALE, lambda x: (steps(x).round(), (largest(x) + x.amax(-1, keepdim=True)) / 254)),
    "a guard that is added": (SCALE, lambda x: (steps(x).round(), scaled(x) + 1e-6)),
    "a negative scale": (
        "the scale of a token is -0.00787402 times its largest value",
        lambda x: ((x / -scaled(x)).round(), -scaled(x)),
    ),
    "fewer steps": ("the largest code of a token is 100", lambda x: ((x * 100 / largest(x)).round(), largest(x) / 100)),
    "clamped": ("the largest code of a token is 100", lambda x: (steps(x).round().clamp(-100, 100), scaled(x))),
    "clipped": ("the values of tokens are clipped to a part of their largest one", clipped_to(0.5)),
    "an odd offset": (SHIFTED.format(127), lambda x: ((steps(x) + 127).round().clamp(0, 254) - 127, scaled(x))),
    "half an offset": (SHIFTED.format(0.5), lambda x: ((steps(x) + 0.5).round(), scaled(x))),
    "an offset that stays": ("a zero point", lambda x: ((steps(x) + 128).round().clamp(0, 255) - 126, scaled(x))),
    "an offset in 16 bits": ("have the code", lambda x: ((steps(x) + 256).round().bfloat16() - 256, scaled(x))),
    "beyond int8": (
        "codes from -128 to 128 are cast to integers and not clamped before, so 128 wraps",
        lambda x: ((x * 127.5 / largest(x)).round().to(torch.int8), largest(x) / 127.5),
    ),
    "without a sign": (
        "so -1 wraps",
        lambda x: (steps(x).round().to(torch.int32).to(torch.uint8), scaled(x)),
    ),
    "of small values none": ("lt", lambda x: (torch.where(steps(x).abs() < 0.4, ZERO, steps(x)).round(), scaled(x))),
    "infinite ones finite": (INFINITE, lambda x: (steps(x).round(), scaled(x).nan_to_num())),
    "a bound that none reaches": (
        "clamp has a case that no row provably reaches",
        lambda x: ((x * 127 / largest(x).clamp(max=1e38)).round(), scaled(x)),
    ),
    "a bound from above of negative scales": (
        VALUES, lambda x: ((x / bounded_scale(x)).round().clamp(-128, 127).to(torch.int8), bounded_scale(x)),
    ),
    "another zero point": ("a zero point", lambda x: ((x / scaled(x)).round().to(torch.int8) + 1, scaled(x))),
    "in float8": (
        "values that round to -17 have the code -16",
        lambda x: ((x / scaled(x)).round().to(torch.float8_e4m3fn), scaled(x)),
    ),
    "in half steps, clamped to what is no code": (
        "expected codes rounded to the nearest whole number, found mul",
        lambda x: ((2 * steps(x).round().clamp(-127, 127)).clamp(-128.5, 127.5), scaled(x) / 2),
    ),
    "a mean": (
        "the codes of tokens are not divided by a largest value",
        lambda x: ((x * 42 / x.abs().mean(-1, keepdim=True)).round(), x.abs().mean(-1, keepdim=True) / 42),
    ),
    "truncated": ("expected codes rounded to the nearest whole number", lambda x: (steps(x).to(torch.int8), scaled(x))),
}


@pytest.mark.parametrize("name", TWINS)
def test_near_twins(name):
    reason, quantise = TWINS[name]
    with refused(reason):
        quantised_tokens(read(quantise)[2])
