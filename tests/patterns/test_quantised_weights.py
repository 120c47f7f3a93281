"""Layers with quantised weights: attention and the key side fuse in every spelling, prologs of int8 codes too.

Near twins are refused for their own reasons."""

import copy
import functools
import math

import pytest
import torch
from lib import quantised
from lib.layers import Rewritten
from lib.quantised import ALL, SPELLINGS, Quantised, Stored, by_rows, of_integers, of_tokens, report_of, run_of
from lib.quantised_models import check_as_exact, in_dtype
from mla_fx.lowering import inductor
from torch.nn.functional import linear

import mla_fx
from mla_fx.cases import DV, B, D, N, T, inputs
from mla_fx.graph.torch_private import make_fx
from mla_fx.readings.behind import quantised_up_projection
from mla_fx.readings.contraction import SECOND_PRODUCT

pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]

PROLOG, INT8_PROLOG, KEY_SIDE, ATTENTION = "mla_prolog", "mla_prolog_v3", "kv_rmsnorm_rope_cache", "latent_attention"
SCALES = "a matrix product is multiplied by a parameter, as by the scales of a quantised weight"


# --- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiply", SPELLINGS)
def test_attention_is_over_latents(multiply):
    """Keys and values are not expanded any more. The prolog takes weights that are dequantised, the key side those that
    are multiplied as codes."""
    run = run_of(Quantised(multiply, SPELLINGS[multiply], "kv_b"))
    own = PROLOG if PROLOG in run.report.fused else KEY_SIDE
    assert run.report.fused == {own: 1, ATTENTION: 1}, str(run.report)
    with torch.profiler.profile(record_shapes=True) as profile:
        run(*inputs())
    shapes = [shape for event in profile.events() for shape in event.input_shapes]
    assert any(shapes) and B * T * N * (D + DV) not in map(math.prod, shapes)


@pytest.mark.slow
@pytest.mark.parametrize("multiply", SPELLINGS)
def test_all_projections_are_quantised(multiply):
    # others cannot be divided into blocks
    names = ("q_b", "kv_b") if SPELLINGS[multiply] is quantised.by_blocks else ALL
    report = report_of(Quantised(multiply, SPELLINGS[multiply], *names))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert {miss.pattern for miss in report.misses} == {"mla_prolog"}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("multiply", SPELLINGS)
def test_the_projection_from_latents_alone_is_plain(multiply):
    """Only int8 tokens have a prolog. Other quantised projections do not stop the norm, the rotation and the cache
    write from being read."""
    own = INT8_PROLOG if multiply in quantised.INT8_TOKENS else KEY_SIDE
    names = ("q_b",) if SPELLINGS[multiply] is quantised.by_blocks else ALL[:-1]
    report = report_of(Quantised(multiply, SPELLINGS[multiply], *names))
    assert report.fused == {own: 1, ATTENTION: 1}, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("multiply", SPELLINGS)
def test_as_exact_in_bfloat16_as_eager_mode(multiply):
    check_as_exact(Quantised(multiply, SPELLINGS[multiply], "kv_b"))
    assert mla_fx.last_report().fused.get(ATTENTION) == 1


@pytest.mark.parametrize("multiply", [quantised.scaled_behind, of_tokens])
def test_inductor_multiplies_codes_as_they_are_stored(multiply, monkeypatch):
    """The graph that it compiles has no copy of them in the dtype of the model, which it would write at each step."""
    graphs = []

    def kept(gm, *_, **__):
        graphs.append(gm.graph)
        return gm.forward

    monkeypatch.setattr(inductor, "compile_fx_inner", kept)
    monkeypatch.setattr(inductor, "SMALL", 0)
    layer = in_dtype(Quantised(multiply, by_rows, *ALL), torch.bfloat16)
    *given, position = inputs()
    given = [value.to(torch.bfloat16) for value in given]
    eager = copy.deepcopy(layer)(*given, position)
    torch.testing.assert_close(torch.compile(layer, backend="mla")(*given, position), eager, rtol=5e-2, atol=5e-2)
    assert mla_fx.last_report().fused.get(ATTENTION) == 1
    (graph,) = graphs
    codes = [node for node in graph.find_nodes(op="placeholder") if node.meta["val"].dtype == torch.int8]
    dtypes = [_widened(node) for node in codes]
    assert len(codes) == len(ALL) and all(found == {torch.float32} for found in dtypes), dtypes


def _widened(node):
    """The dtypes to which views of a node are cast."""
    values = [user for user in node.users if user.meta["val"].dtype != torch.int8]
    moved = [user for user in node.users if user.meta["val"].dtype == torch.int8]
    return {user.meta["val"].dtype for user in values}.union(*map(_widened, moved))


# --- near twins ------------------------------------------------------------------------------------------------------


def with_bias(x, w):
    return linear(x, w.codes.to(x.dtype)) * w.scales + w.scales


def with_second_branch(x, w):
    return linear(x, w.codes.to(x.dtype)) * w.scales + linear(x[..., :4], w.codes[:, :4].to(x.dtype))


def with_outliers(x, w):
    """bitsandbytes: the columns of outliers are multiplied as they are, and added."""
    flat = x.reshape(-1, x.shape[-1])
    outliers = flat[:, :2] @ (w.codes[:, :2].to(x.dtype) * w.scales.unsqueeze(1)).t()
    rest = of_integers(torch.cat((torch.zeros_like(flat[:, :2]), flat[:, 2:]), -1), w)
    return (rest + outliers).view(*x.shape[:-1], -1)


def with_outliers_added_in_one_call(x, w):
    flat = x.reshape(-1, x.shape[-1])
    rest = of_integers(torch.cat((torch.zeros_like(flat[:, :2]), flat[:, 2:]), -1), w)
    weight = (w.codes[:, :2].to(x.dtype) * w.scales.unsqueeze(1)).t()
    return torch.addmm(rest, flat[:, :2], weight).view(*x.shape[:-1], -1)


def with_a_bias_of_integers(x, w):
    """Ascend's static W8A8: it holds the share of a zero point, too."""
    codes = (x.reshape(-1, x.shape[-1]) * 30).round().clamp(-128, 127).to(torch.int8)
    bias = w.codes.sum(1, dtype=torch.int32)
    product = codes.to(torch.int32) @ w.codes.to(torch.int32).t() + bias
    return (product.to(x.dtype) * (w.scales / 30)).view(*x.shape[:-1], -1)


def quantised_behind(x, w):
    """Keys and values are quantised after the projection, per head: no function of the latents is absorbed."""
    codes, scales = quantised.tokens(quantised.scaled_behind(x, w).unflatten(-1, (N, -1)))
    return (codes * scales).flatten(-2)


def divided(x, w):
    return linear(x, w.codes.to(x.dtype)) / w.scales


def of_rows_and_columns(x, w):
    """The scales are one tensor [T, Out]."""
    return linear(x, w.codes.to(x.dtype)) * torch.linspace(0.5, 1.5, T * len(w.scales)).view(T, -1)


def in_narrow_integers(x, w):
    """Wraps around in 8 bits."""
    codes, scales = quantised.tokens(x.reshape(-1, x.shape[-1]))
    return ((codes.to(torch.int8) @ w.codes.t()).to(x.dtype) * scales * w.scales).view(*x.shape[:-1], -1)


def with_zero_points(x, w):
    flat = x.reshape(-1, x.shape[-1])
    step = (flat.amax(-1, keepdim=True) - flat.amin(-1, keepdim=True)) / 255
    zero = (-128 - (flat.amin(-1, keepdim=True) / step).round()).to(torch.int32)
    codes = ((flat / step).round() + zero).clamp(-128, 127).to(torch.int8)
    product = torch._int_mm(codes, w.codes.t()) - zero * w.codes.sum(1, dtype=torch.int32)
    return (product.to(x.dtype) * step * w.scales).view(*x.shape[:-1], -1)


def unsigned(x, w, shift=128, weight=lambda codes: codes, dtype=torch.int32):
    codes, scales = quantised.tokens(x.reshape(-1, x.shape[-1]))
    product = torch._int_mm((codes.to(torch.int8).to(torch.int32) + 128).to(torch.uint8), w.codes.t())
    product = product - weight(w.codes).t().sum(0, keepdim=True, dtype=dtype) * shift
    return (product.to(x.dtype) * scales * w.scales).view(*x.shape[:-1], -1)


def corrected_by_a_column(x, w):
    codes, scales = quantised.tokens(x.reshape(-1, x.shape[-1]))
    product = torch._int_mm((codes.to(torch.int8).to(torch.int32) + 128).to(torch.uint8), w.codes.t())
    return ((product - w.codes[:, 0].to(torch.int32) * 128) * scales * w.scales).view(*x.shape[:-1], -1)


def rounded_on_the_way(x, w):
    return quantised.scaled_behind(x, w).to(torch.bfloat16).to(x.dtype)


ANOTHER_WEIGHT = "a product of integers is corrected by the sum of another weight"
NEAR_TWINS = {
    rounded_on_the_way: "the program rounds to torch.bfloat16, the operator only to torch.float32",
    with_bias: "the projection has a bias, which the fused operators do not support",
    with_second_branch: SECOND_PRODUCT,
    with_outliers: SECOND_PRODUCT,
    with_outliers_added_in_one_call: SECOND_PRODUCT,
    with_a_bias_of_integers: "a product of codes has a bias in torch.int32, which the fused operators do not support",
    quantised_behind: "expected a matrix product, found an elementwise mul",
    divided: "a product of codes is multiplied by a power of",
    of_rows_and_columns: "the scales of a product belong to neither operand",
    in_narrow_integers: "a product of integers in torch.int8 may overflow",
    with_zero_points: "a product of integers is corrected, expected by 128, found mul",
    functools.partial(unsigned, shift=127): "a product of integers is corrected, expected by 128, found mul",
    functools.partial(unsigned, weight=lambda codes: codes.roll(1, 0)): ANOTHER_WEIGHT,
    functools.partial(unsigned, weight=lambda codes: torch.cat((codes[1:], codes[:1]))): ANOTHER_WEIGHT,
    corrected_by_a_column: "expected 128 times the sum of a weight, found",
    functools.partial(unsigned, dtype=torch.int8): "integers of 8 bits are computed with, which may overflow",
}


@pytest.mark.parametrize("multiply", NEAR_TWINS)
def test_near_twins(multiply):
    report = report_of(Quantised(multiply, by_rows, "kv_b"))
    assert report.fused == {}, str(report)
    assert [miss.reason[: len(NEAR_TWINS[multiply])] for miss in report.misses] == [NEAR_TWINS[multiply]]


@pytest.mark.parametrize("names", [("q_b",), ("kv_a",)])
def test_a_bias_of_integers_is_named(names):
    report = report_of(Quantised(with_a_bias_of_integers, by_rows, *names))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.reason for miss in report.misses] == [NEAR_TWINS[with_a_bias_of_integers]]


class TwoQuantisers(Quantised):
    """Keys and values are projected from latents that are quantised differently."""

    def keys(self, latent, k_rope):
        key, _ = super().keys(latent, k_rope)
        w = Stored(self.kv_b_codes, self.kv_b_scales)
        value = self.multiply(latent.clamp(-1, 1), w).view(B, T, N, D + DV).transpose(1, 2)[..., D:]
        return key, value


class NextScale(Quantised):
    """Values of a token are multiplied by the scale of the next one, keys by its own."""

    def keys(self, latent, k_rope):
        codes, scales = quantised.tokens(latent)
        weight = self.kv_b_codes.to(latent.dtype)
        expanded, other = (
            (linear(codes, weight) * by * self.kv_b_scales).view(B, T, N, D + DV).transpose(1, 2)
            for by in (scales, scales.roll(1, 2))
        )
        return torch.cat((expanded[..., :D], k_rope.expand(-1, N, -1, -1)), dim=-1), other[..., D:]


@pytest.mark.parametrize("kind", [TwoQuantisers, NextScale])
def test_keys_and_values_of_different_latents(kind):
    report = report_of(kind(of_tokens, by_rows, "kv_b"))
    assert report.fused == {}, str(report)
    assert [miss.reason.partition(":")[0] for miss in report.misses] == ["kv_cache is not one tensor"]


def reasons_in(dtype, multiply):
    """Why a layer in this dtype does not fuse."""
    *given, position = inputs()
    layer = in_dtype(Quantised(multiply, by_rows, "kv_b"), dtype)
    Rewritten(layer)(*(value.to(dtype) for value in given), position)
    report = mla_fx.last_report()
    assert report.fused == {}
    return [miss.reason for miss in report.misses]


def test_keys_and_values_are_rounded_to_a_third_dtype():
    """Attention in bfloat16 over latents in float32 rounds once, but not to float16 before."""
    because = "the program rounds to torch.float16, the operator only to torch.float32"
    assert reasons_in(torch.bfloat16, lambda x, w: quantised.in_float32(x, w).half().to(x.dtype)) == [because]


def test_codes_in_float16_may_leave_its_range():
    because = "codes are multiplied in torch.float16, whose range they may leave"
    assert reasons_in(torch.float16, quantised.scaled_behind) == [because]


def test_a_written_weight_takes_effect():
    """Codes, scales and zero points count from the next call on."""
    layer = Quantised(quantised.of_groups, quantised.by_groups, "kv_b")
    compiled = torch.compile(layer, backend="mla")
    for part in ("codes", "scales", "zeros", "codes"):
        getattr(layer, f"kv_b_{part}").copy_(getattr(layer, f"kv_b_{part}").flip(0))
        theirs = copy.deepcopy(layer)
        torch.testing.assert_close(compiled(*inputs()), theirs(*inputs()), rtol=1e-4, atol=1e-5)
        assert mla_fx.last_report().fused.get(ATTENTION) == 1


# --- what looks like a quantised projection, for warnings ------------------------------------------------------------


@pytest.mark.parametrize(
    ("hidden", "rank", "width", "down", "up", "found"),
    [
        (32, 8, 24, torch.float32, torch.int8, torch.int8),
        (32, 8, 24, torch.int8, torch.int8, torch.int8),
        (32, 8, 24, torch.int8, torch.float32, None),  # not quantised
        (32, 8, 24, torch.float32, torch.bool, None),
        (32, 8, 8, torch.float32, torch.int8, None),  # no wider than what it is made of: not projected up
        (8, 8, 24, torch.float32, torch.int8, None),  # made of nothing wider: no latents
    ],
)
def test_near_twins_of_a_quantised_up_projection(hidden, rank, width, down, up, found):
    def value(x, down, up, scales):
        latent = x.view(6, -1) @ down.to(x.dtype).T
        return (latent @ up.to(x.dtype).T * scales).view(2, 3, -1)

    given = torch.ones(2, 3, hidden), torch.ones(rank, hidden).to(down), torch.ones(width, rank).to(up)
    graph = make_fx(value)(*given, torch.ones(width)).graph
    assert quantised_up_projection(graph.output_node().args[0]) == found
