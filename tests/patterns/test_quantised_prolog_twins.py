"""Near twins of quantised tokens: layers that are no prolog, and the reason for each."""

import pytest
import torch
from lib.quantised import Quantised, report_of
from lib.quantised_prologs import ATTENTION, DOWN, KEY_SIDE, SmoothedScales, divided, in_floats, layer_of

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


def truncated(x):
    _, scales = divided(x)
    return (x / scales).to(torch.int8), scales


def with_scales_of_the_neighbour(x):
    codes, scales = divided(x)
    return codes, scales.roll(1, 1)


def by_the_largest_of_all_tokens(x):
    scales = x.abs().amax((1, 2), keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales


def by_the_largest_without_sign(x):
    scales = x.amax(-1, keepdim=True) / 127
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def by_the_mean(x):
    scales = x.abs().mean(-1, keepdim=True) / 42
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def by_the_largest_of_other_values(x):
    scales = (x + 1).abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales


def with_an_added_guard(x):
    scales = x.abs().amax(-1, keepdim=True) / 127 + 1e-6
    return (x / scales).round().to(torch.int8), scales


def with_fewer_steps(x):
    scales = x.abs().amax(-1, keepdim=True) / 100
    return (x / scales).round().to(torch.int8), scales


def clamped(x):
    codes, scales = divided(x)
    return codes.clamp(-100, 100), scales


def from_two_largest(x):
    """The ends of two values: the second is larger."""
    scales = torch.maximum(-x.amin(-1, keepdim=True), (2 * x).amax(-1, keepdim=True)) / 127
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def in_half_steps(x):
    """Codes are clamped to a number that is none of them."""
    codes, scales = in_floats(x)
    return (2 * codes).clamp(-128.5, 127.5), scales / 2


def beyond_int8(x):
    """The largest code, 128, wraps to -128 before it is clamped."""
    scales = x.float().abs().amax(-1, keepdim=True) / 127.5
    return (x / scales).round().to(torch.int8).clamp(-128, 127), scales


def with_a_bound_from_above(x):
    """All factors are negative, so the least is the bound of the largest scale."""
    scales = -(-x.abs().amax(-1, keepdim=True) / 127).clamp_min(-0.01)
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def with_a_zero_point(x):
    codes, scales = divided(x)
    return codes + 1, scales


def in_uint8(x):
    """Negative codes wrap around."""
    _, scales = divided(x)
    return (x / scales).round().clamp(-128, 127).to(torch.int32).to(torch.uint8), scales


def in_float8(x):
    """Codes above 16 are rounded once more."""
    _, scales = divided(x)
    return (x / scales).round().to(torch.float8_e4m3fn), scales


COMPUTED_FROM = "codes or scales of tokens are computed from {}, expected from a value and the largest one"
QUOTIENTS = "the codes of tokens are not a number of steps times value / largest magnitude"
NEAR_TWINS = {
    in_uint8: "codes from -127 to 127 are cast to integers and not clamped before, so -1 wraps",
    in_float8: "values that round to -17 have the code -16",
    truncated: "expected codes rounded to the nearest whole number, found div",
    with_scales_of_the_neighbour: COMPUTED_FROM.format("roll"),
    by_the_largest_of_all_tokens: "the scale of the query's latent is not that of one token",
    by_the_largest_without_sign: QUOTIENTS,
    by_the_mean: "the codes of tokens are not divided by a largest value",
    by_the_largest_of_other_values: QUOTIENTS,
    with_an_added_guard: QUOTIENTS,
    with_fewer_steps: "the largest code of a token is 100, expected 127",
    clamped: "the largest code of a token is 100, expected 127",
    from_two_largest: QUOTIENTS,
    in_half_steps: "expected codes rounded to the nearest whole number, found mul",
    beyond_int8: "codes from -128 to 128 are cast to integers and not clamped before, so 128 wraps",
    with_a_bound_from_above: QUOTIENTS,
    with_a_zero_point: "the codes have a zero point, expected none",
}


@pytest.mark.slow
@pytest.mark.parametrize("quantise", NEAR_TWINS)
def test_near_twins(quantise):
    report = report_of(layer_of(quantise, "q_b"))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == [NEAR_TWINS[quantise]]


class SmoothedByToken(Quantised):
    """The latent is multiplied by its own largest value, which no smoothing does."""

    def query(self, x):
        latent = self.norm(self.project(x, "q_a"), self.q_gamma)
        return self.project(latent * latent.amax(-1, keepdim=True), "q_b")


NOT_SMOOTHED = {
    SmoothedScales: COMPUTED_FROM.format("linspace"),
    SmoothedByToken: "the query's latent is multiplied by a tensor that differs from token to token",
}


@pytest.mark.parametrize("names", [("q_b",), DOWN], ids=["q_b", "all"])
@pytest.mark.parametrize("kind", NOT_SMOOTHED)
def test_what_is_not_smoothed(kind, names):
    report = report_of(layer_of(divided, *names, kind=kind))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == [NOT_SMOOTHED[kind]]


SOME = {
    ("q_a", "q_b"): "token_x is not one tensor",
    ("q_a", "kv_a"): "mla_prolog_v3 takes int8 weights of q_b or of all projections; weight_qr, weight_uq are not int8",
}


@pytest.mark.parametrize("names", SOME)
def test_some_projections(names):
    report = report_of(layer_of(divided, *names))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason[: len(SOME[names])] for miss in report.misses] == [SOME[names]]


class OtherTokens(Quantised):
    """The key side quantises other hidden states than the query."""

    def rows(self, x):
        return super().rows(x.clamp(-1, 1))


def test_codes_of_other_tokens():
    report = report_of(layer_of(divided, *DOWN, kind=OtherTokens))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason.partition(":")[0] for miss in report.misses] == ["token_x is not one tensor"]
