"""Layers with int8 projections: one prolog, if the program quantises its tokens as the operator does.

In float32 a code that differs would show, because a step of a code is a hundredth of a value."""

import copy

import pytest
import torch
from lib.comparing import Stack
from lib.layers import Rewritten, variant
from lib.quantised import Quantised, by_rows, of_sums_cast_back, report_of
from lib.quantised_models import check_as_exact
from lib.quantised_prologs import ATTENTION, DOWN, KEY_SIDE, PROLOG, SmoothedScales, divided, given, in_floats, layer_of
from torch.nn.functional import linear

import mla_fx
from mla_fx.cases import HCQ, Layer

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


def multiplied(x):
    largest = x.float().abs().max(-1, keepdim=True)[0]
    return (x * (127 / largest)).round().to(torch.int8), largest / 127


def by_a_true_quotient(x):
    """pypto: codes go through int32 and float16."""
    largest = x.float().abs().amax(-1, keepdim=True)
    factor = torch.full_like(largest, 127.0) / largest
    return (x * factor).round().to(torch.int32).to(torch.float16).trunc().to(torch.int8), 1 / factor


def by_both_ends(x):
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    low, high = torch.minimum(low, torch.zeros_like(low)), torch.maximum(high, torch.zeros_like(high))
    scales = torch.maximum(-low, high) / 127
    return (x * (1.0 / scales)).clamp(-127, 127).round().to(torch.int8), scales


def by_aminmax(x):
    low, high = torch.aminmax(x.float(), dim=-1, keepdim=True)
    scales = torch.maximum(high, -low).mul(1 / 127).clamp(min=0)
    return x.float().div(scales).round().clamp_min(-128).clamp_max(127).to(torch.int8), scales


def by_a_norm(x):
    scales = torch.linalg.vector_norm(x.float(), float("inf"), dim=-1, keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales


def clamped_after_the_cast(x):
    """No code is beyond 127 before."""
    codes, scales = by_a_norm(x)
    return codes.to(torch.int16).clamp(-128, 127).to(torch.int8), scales


QUANTISERS = (
    divided, multiplied, by_a_true_quotient, by_both_ends, by_aminmax, by_a_norm, clamped_after_the_cast, in_floats,
)  # fmt: skip


all_or_one = pytest.mark.parametrize("names", [("q_b",), DOWN], ids=["q_b", "all"])


@pytest.mark.parametrize("quantise", QUANTISERS)
def test_one_prolog(quantise):
    report = report_of(layer_of(quantise, "q_b"))
    assert report.fused == {PROLOG: 1, ATTENTION: 1}, str(report)


@pytest.mark.parametrize("quantise", [divided, in_floats])
def test_one_prolog_of_int8_projections(quantise):
    """Whether codes are cast to integers; whatever else quantises hidden states stays in the graph."""
    report = report_of(layer_of(quantise, *DOWN))
    assert report.fused == {PROLOG: 1, ATTENTION: 1}, str(report)


@pytest.mark.slow
@all_or_one
@pytest.mark.parametrize("quantise", [divided, multiplied, by_a_true_quotient, in_floats])
def test_as_exact_in_bfloat16_as_eager_mode(quantise, names):
    check_as_exact(layer_of(quantise, *names))
    assert mla_fx.last_report().fused == {PROLOG: 1, ATTENTION: 1}


class Smoothed(Quantised):
    """The query's latent is multiplied by a factor per column before it is quantised; the weight was divided by it."""

    def query(self, x):
        smooth = torch.linspace(0.5, 1.5, HCQ)
        return self.project(self.norm(self.project(x, "q_a"), self.q_gamma) * smooth, "q_b")


@all_or_one
def test_smooth_scales(names):
    layer = layer_of(divided, *names, kind=Smoothed)
    assert report_of(layer).fused == {PROLOG: 1, ATTENTION: 1}


def multiplied_by(scaled):
    """The product of codes by a function of it, the largest values of tokens and the scales of outputs."""

    def multiply(x, w):
        largest = x.abs().amax(-1, keepdim=True)
        product = linear((x * (127 / largest)).round().clamp(-127, 127), w.codes.float())
        return scaled(product, largest, w.scales)

    return multiply


# Norms and rotations read a number behind the scales as their own; it is part of the scales all the same.
SCALED = {
    "by one product of scales": multiplied_by(lambda product, largest, scales: product * (largest * scales / 127)),
    "by that of outputs first": multiplied_by(lambda product, largest, scales: product * (scales * 3 * largest / 381)),
    "sums cast back": of_sums_cast_back,
    "a number behind both": multiplied_by(lambda product, largest, scales: product * largest * scales / 127),
    "a number behind": multiplied_by(lambda product, largest, scales: product * (largest * scales) * (1 / 127)),
}


@all_or_one
@pytest.mark.parametrize("name", SCALED)
def test_scales_that_are_multiplied_first_or_a_number_behind_them(name, names):
    assert report_of(Quantised(SCALED[name], by_rows, *names)).fused == {PROLOG: 1, ATTENTION: 1}


class KeyTimes(Quantised):
    """A number multiplies k_rope alone."""

    number = 3.0

    def rotate_key(self, x, cos, sin):
        return super().rotate_key(x * self.number, cos, sin)


KeyTimesNegative = variant("KeyTimesNegative", KeyTimes, number=-3.0)


def test_a_number_of_the_rotary_key():
    """Scales of the rows take it, unless it is negative: the latent's norm would turn its sign."""
    assert report_of(layer_of(divided, *DOWN, kind=KeyTimes)).fused == {PROLOG: 1, ATTENTION: 1}
    for kind, names in ((KeyTimesNegative, DOWN), (KeyTimes, ("q_b",))):
        torch._dynamo.reset()
        report = report_of(layer_of(divided, *names, kind=kind))
        assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}
        assert f"q_rope relative to k_rope by {1 / kind.number:.6g}; the prolog takes one number" in str(report)


def test_one_scale_for_a_whole_weight():
    layer = layer_of(divided, *DOWN)
    for name in DOWN:
        setattr(layer, f"{name}_scales", getattr(layer, f"{name}_scales").mean())
    assert report_of(layer).fused == {PROLOG: 1, ATTENTION: 1}


def test_layers_that_are_alike():
    ours, theirs = (Stack(*(layer_of(divided, *DOWN) for _ in range(3))) for _ in range(2))
    found = Rewritten(ours)(*given())
    torch.testing.assert_close(found, theirs(*given()), rtol=1e-3, atol=1e-3)
    assert mla_fx.last_report().fused == {PROLOG: 3, ATTENTION: 3}


@pytest.mark.slow
def test_inductor_multiplies_int8_projections_one_by_one():
    layer = layer_of(divided, "q_b")
    theirs = copy.deepcopy(layer)
    torch.testing.assert_close(torch.compile(layer, backend="mla")(*given()), theirs(*given()), rtol=1e-4, atol=1e-5)
    report = mla_fx.last_report()
    assert PROLOG not in report.fused and report.fused[ATTENTION] == 1
    reasons = [miss.reason for miss in report.misses if miss.pattern == "mla_prolog"]
    assert reasons == ["target 'inductor': int8 projections are faster one by one than in mla_prolog_v3"]


# --- another quantisation than a kernel's ----------------------------------------------------------------------------


def as_torchao_does(x):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    low, high = torch.minimum(low, torch.zeros_like(low)), torch.maximum(high, torch.zeros_like(high))
    scales = (torch.maximum(-low, high) / 127.5).clamp(min=1.1920928955078125e-07).float()
    codes = (x * (1.0 / scales)).round() + torch.zeros_like(scales, dtype=torch.int8)
    return codes.clamp(-128, 127).to(torch.int8), scales


def as_sglang_does(x):
    largest = x.float().abs().max(-1, keepdim=True)[0].clamp_min(1e-7)
    return (x * (127 / largest)).round().to(torch.int8), largest / 127


def with_a_guard_that_counts(x):
    scales = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-3)
    return (x / scales).round().to(torch.int8), scales


COUNTS = "the largest value of a token counts as {:.3g} at least, in a kernel as it is"
DIFFERENCES = {
    as_torchao_does: f"the largest code of a token is 127.5, of a kernel 127; {COUNTS.format(1.52e-05)}",
    as_sglang_does: COUNTS.format(1e-7),
    with_a_guard_that_counts: COUNTS.format(0.127),
}


@pytest.mark.parametrize("quantise", DIFFERENCES)
def test_another_quantisation_is_taken_on_request(quantise):
    """The report names each difference; the answer moves by no more than the quantisation itself."""
    report = report_of(layer_of(quantise, "q_b"))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    said = f"{DIFFERENCES[quantise]}; quant='vendor' takes the operator's codes"
    assert [miss.reason for miss in report.misses] == [said]
    torch._dynamo.reset()
    layer, plain, options = layer_of(quantise, "q_b"), Layer(), {"quant": "vendor"}
    ours = Rewritten(copy.deepcopy(layer), **options)(*given())
    report = mla_fx.last_report()
    assert report.fused == {PROLOG: 1, ATTENTION: 1}, str(report)
    assert [note for note in report.notes if note.startswith("mla_prolog: ")] == [
        f"mla_prolog: {difference}" for difference in DIFFERENCES[quantise].split("; ")
    ]
    eager, unquantised = layer(*given()), plain(*given())
    assert (ours - eager).norm() <= 2 * (eager - unquantised).norm()


def as_deepseek_does(x):
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    return (x * (127 / largest)).round().to(torch.int8), largest / 127


def test_a_guard_that_acts_because_a_norm_has_small_weights():
    """The weight of the norm may be 1e-5, and that of the next projection makes up for it."""
    layer = layer_of(as_deepseek_does, "q_b")
    layer.q_gamma.data *= 1e-5
    layer.q_b_scales *= 1e5
    report = report_of(layer)
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == [
        f"{COUNTS.format(1e-4)}; quant='vendor' takes the operator's codes"
    ]


def in_the_dtype_of_the_model(x):
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round().clamp(-128, 127).to(torch.int8), scales


def test_codes_computed_in_bfloat16():
    """One in twenty of a kernel's codes would be another."""
    layer = layer_of(in_the_dtype_of_the_model, "q_b", dtype=torch.bfloat16)
    for quant, own in (("exact", KEY_SIDE), ("vendor", PROLOG)):
        torch._dynamo.reset()
        options = {"quant": quant}
        Rewritten(copy.deepcopy(layer), **options)(*given(torch.bfloat16))
        report = mla_fx.last_report()
        assert report.fused == {own: 1, ATTENTION: 1}, str(report)
        said = "the codes of tokens are computed in torch.bfloat16, in a kernel in torch.float32"
        assert said in (report.misses[0].reason if own == KEY_SIDE else "\n".join(report.notes))


def test_the_quantiser_of_hidden_states_is_the_programs_own():
    """It stays in the graph, so any will do."""

    def mixed(x):
        return divided(x) if x.shape[-1] == HCQ else as_torchao_does(x)

    assert report_of(layer_of(mixed, *DOWN)).fused == {PROLOG: 1, ATTENTION: 1}


# --- near twins ------------------------------------------------------------------------------------------------------


def truncated(x):
    _, scales = divided(x)
    return (x / scales).to(torch.int8), scales


def of_the_neighbour(x):
    codes, scales = divided(x)
    return codes, scales.roll(1, 1)


def by_the_largest_of_all_tokens(x):
    scales = x.abs().amax((1, 2), keepdim=True) / 127
    return (x / scales).round().to(torch.int8), scales


COMPUTED_FROM = "codes or scales of tokens are computed from {}, expected from a value and the largest one"
NEAR_TWINS = {  # the others are in tests/readings/test_tokens.py
    truncated: "expected codes rounded to the nearest whole number, found div",
    of_the_neighbour: COMPUTED_FROM.format("roll"),
    by_the_largest_of_all_tokens: "the scale of the query's latent is not that of one token",
}


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


@all_or_one
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
