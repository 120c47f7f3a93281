"""Prologs where keys and values are projected by int8 codes: a target that hoists multiplies those of keys by their
scales once, and both prologs take the product as a weight."""

import copy

import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from lib.quantised import Quantised, Stored, by_rows, of_integers, of_tokens, scaled_behind
from lib.quantised_models import check_as_exact, quantise
from lib.quantised_prologs import ATTENTION, DOWN, KEY_SIDE, PROLOG, Compiled, divided, given, multiply_by
from torch.nn.functional import linear

from mla_fx.cases import DV, HCKV, D, N

pytestmark = pytest.mark.usefixtures("no_gradients")

PLAIN_PROLOG = "mla_prolog"


def check(layer, **options):
    """The report of a compiled layer, after its output and caches were compared with eager mode."""
    compiled, theirs = Compiled(copy.deepcopy(layer), **options), copy.deepcopy(layer)
    ours = compiled.run
    torch.testing.assert_close(ours(*given()), theirs(*given()), rtol=1e-4, atol=1e-5)
    for name in ("kv_cache", "kr_cache"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-5)
    return compiled.report


class Keys(Quantised):
    """Keys and values are multiplied in their own spelling."""

    multiply_keys = staticmethod(scaled_behind)

    def project(self, x, name):
        if name != "kv_b":
            return super().project(x, name)
        return self.multiply_keys(x, Stored(self.kv_b_codes, self.kv_b_scales))


def layer_of(names, multiply, kind=Keys):
    """A layer with W8A8 projections `names`, and `kv_b` multiplied in this spelling."""
    layer = kind(multiply_by(divided), by_rows, *names, "kv_b")
    layer.multiply_keys = multiply
    return layer


PROLOGS = {(): PLAIN_PROLOG, ("q_b",): PROLOG, DOWN: PROLOG}
every_prolog = pytest.mark.parametrize("names", PROLOGS, ids=["plain", "q_b", "all"])


@every_prolog
@pytest.mark.parametrize("multiply", [scaled_behind, of_tokens, of_integers, multiply_by(divided)])
def test_one_prolog(names, multiply):
    report = check(layer_of(names, multiply))
    assert report.fused == {PROLOGS[names]: 1, ATTENTION: 1}, str(report)


REASONS = {
    (): "only q_nope is multiplied by a tensor",
    ("q_b",): "weight_uq has 2 scales, mla_prolog_v3 takes one",
    DOWN: "weight_uq has 2 scales, mla_prolog_v3 takes one",
}


@every_prolog
def test_nothing_changes_where_nothing_is_kept(names):
    report = check(layer_of(names, scaled_behind), lay_out=False)
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    because = "the scales of weight_uk multiply the query, unless a target keeps a copy of weights"
    assert [miss.reason for miss in report.misses] == [f"{REASONS[names]}: {because}"]


@pytest.mark.slow
@every_prolog
@pytest.mark.parametrize("multiply", [scaled_behind, multiply_by(divided)], ids=["weights", "tokens"])
def test_as_exact_in_bfloat16_as_eager_mode(names, multiply):
    compilations = []

    def compiled(layer):
        compilations.append(Compiled(layer))
        return compilations[0].run

    check_as_exact(layer_of(names, multiply), compiled)
    assert compilations[0].report.fused == {PROLOGS[names]: 1, ATTENTION: 1}


@every_prolog
def test_scales_are_in_a_copy_of_the_weight_that_follows_them(names):
    """It is computed again when codes or scales are written. The report counts it."""
    layer = layer_of(names, scaled_behind)
    compiled, theirs = Compiled(layer), copy.deepcopy(layer)
    for part in ("codes", "scales", "codes"):
        for one in (layer, theirs):
            stored = getattr(one, f"kv_b_{part}")
            stored.copy_(stored.flip(0))
        torch.testing.assert_close(compiled.run(*given()), theirs(*given()), rtol=1e-4, atol=1e-5)
    assert any(note.startswith("6 weights laid out once") for note in compiled.report.notes), compiled.report.notes


@pytest.mark.slow
def test_torchao():
    model = tiny_model("deepseek_v3", num_hidden_layers=2)
    quantise(model, "int8 weights", but=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"))
    ours, ids, compiled = empty_cache(model, "static", 24), tokens(2, 1), Compiled(model)
    model(tokens(2, 12), past_key_values=ours)
    theirs = copy.deepcopy(ours)
    found, wanted = compiled.run(ids, past_key_values=ours).logits, model(ids, past_key_values=theirs).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache_tensors(ours), cache_tensors(theirs), rtol=1e-4, atol=1e-5)
    assert compiled.report.fused == {PLAIN_PROLOG: 2, ATTENTION: 2}


# --- near twins ------------------------------------------------------------------------------------------------------


def by_scales_in_another_order(x, w):
    """Heads have the scales of other heads, and columns those of other columns: views of the parameter."""
    return linear(x, w.codes.to(x.dtype)) * w.scales.view(D + DV, N).t().reshape(-1)


def by_scales_along_the_latent(x, w):
    """They multiply the latents: attention is over latents that the cache does not hold."""
    return linear(x * w.scales[:HCKV], w.codes.to(x.dtype)) * w.scales


def by_one_scale_per_head(x, w):
    scales = w.scales[:N].view(N, 1).expand(-1, D + DV).reshape(-1)
    return linear(x, w.codes.to(x.dtype)) * scales


def by_two_scales(x, w):
    return by_scales_in_another_order(x, w) * w.scales


def by_scales_of_the_next_head(x, w):
    return linear(x, w.codes.to(x.dtype)) * w.scales.roll(D + DV)


@pytest.mark.slow
@every_prolog
@pytest.mark.parametrize(
    "multiply",
    [
        by_scales_in_another_order,
        by_scales_along_the_latent,
        by_one_scale_per_head,
        by_two_scales,
        by_scales_of_the_next_head,
    ],
)
def test_other_scales_are_kept_right(names, multiply):
    report = check(layer_of(names, multiply))
    assert report.fused == {PROLOGS[names]: 1, ATTENTION: 1}, str(report)


def by_scales_that_depend_on_tokens(x, w):
    return linear(x, w.codes.to(x.dtype)) * (w.scales * x.abs().mean())


def test_scales_may_depend_on_tokens():
    """The prolog would need the cache that it writes."""
    report = check(layer_of((), by_scales_that_depend_on_tokens))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == ["the operator would need a value that it computes itself"]


def by_scales_on_both_sides_of_a_weight(x, w):
    return linear(x, w.codes.to(x.dtype) * w.scales[:HCKV]) * w.scales


def by_a_scale_per_token_and_column(x, w):
    return linear(x, w.codes.to(x.dtype)) * (x.abs().amax(-1, keepdim=True) + w.scales)


TWINS = {
    by_scales_on_both_sides_of_a_weight: "a matrix product is multiplied by a parameter, as by the scales of",
    by_a_scale_per_token_and_column: "the scales of a product belong to neither operand",
}


@pytest.mark.parametrize("multiply", TWINS)
def test_near_twins(multiply):
    report = check(layer_of((), multiply))
    assert report.fused == {}, str(report)
    assert [miss.reason[: len(TWINS[multiply])] for miss in report.misses] == [TWINS[multiply]]


class QueryScaled(Keys):
    """The program multiplies columns of the query, not codes of keys."""

    def attend(self, q_nope, *rest):
        return super().attend(q_nope * torch.linspace(0.5, 1.5, D), *rest)


class QueryScaledByToken(Keys):
    """A number per token multiplies only the part without a rotation, the operator's whole result."""

    def attend(self, q_nope, *rest):
        return super().attend(q_nope * torch.linspace(0.5, 1.5, q_nope.shape[2]).unsqueeze(-1), *rest)


@pytest.mark.parametrize("kind", [QueryScaled, QueryScaledByToken])
def test_scales_of_the_query_are_not_those_of_keys(kind):
    report = check(layer_of((), scaled_behind, kind=kind))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == ["only q_nope is multiplied by a tensor"]
