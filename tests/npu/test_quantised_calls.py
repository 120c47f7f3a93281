"""Layers that call torch_npu's operators for quantised values: how a call is read, what is refused, and what fuses."""

import copy
import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
from lib.comparing import compiled
from lib.quantised import Quantised, Stored, by_rows, report_of
from lib.quantised_prologs import ATTENTION, KEY_SIDE, PROLOG, given
from lib.traced import Traced, agree, dense
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx
from mla_fx.cases import HCQ
from mla_fx.errors import NoMatch
from mla_fx.readings.codes.products import quantised_product
from mla_fx.readings.codes.tokens import quantised_tokens
from mla_fx.readings.element import Scales, operand, resolve
from mla_fx.readings.views import fresh_index
from npu import cpu_kernels

cpu_kernels.register()
npu = torch.ops.npu
BATCH, STEPS, K, COLUMNS = 2, 3, 16, 8
ROWS = BATCH * STEPS
INT4 = 285  # torch_npu's number


@pytest.fixture(autouse=True)
def without_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def codes(*shape):
    return (dense(*shape) * 40).round().clamp(-127, 127).to(torch.int8)


def scales(*shape, dtype=torch.float32):
    return (dense(*shape).abs() + 0.1).to(dtype)


def nodes(function, *given):
    """What a function returns, as nodes of a graph. Nothing runs it."""
    return make_fx(function, tracing_mode="fake")(*given).graph.output_node().args[0]


def scaled(traced, element, dims):
    """The numbers of codes and their scales."""
    factors = [traced.read(scale, *dims) for scale in element.scales.by]
    return math.prod(factors, start=traced.read(replace(element, scales=None), *dims).float())


# --- products --------------------------------------------------------------------------------------------------------


def product(x, w, column, **options):
    return npu.npu_quant_matmul(x, w, column, **{"output_dtype": torch.float32} | options)


def of_tokens(x, w, column, row):
    return product(x, w, column, pertoken_scale=row)


MATRICES = codes(ROWS, K), codes(K, COLUMNS)
PRODUCTS = {
    "rows and columns": (of_tokens, (*MATRICES, scales(COLUMNS), scales(ROWS))),
    "one row": (of_tokens, (codes(1, K), codes(K, COLUMNS), scales(COLUMNS), scales(1))),
    "one sequence": (of_tokens, (codes(1, STEPS, K), codes(K, COLUMNS), scales(COLUMNS), scales(STEPS))),
    "one scale for the weight": (of_tokens, (*MATRICES, scales(1), scales(ROWS))),
    "sequences, and a transposed weight": (
        lambda x, w, column, row: of_tokens(x.flatten(0, 1), w.t(), column, row.flatten()).unflatten(0, x.shape[:-1]),
        (codes(BATCH, STEPS, K), codes(COLUMNS, K), scales(COLUMNS), scales(BATCH, STEPS, 1)),
    ),
    "bfloat16": (
        lambda x, w, column, row: product(x, w, column, pertoken_scale=row, output_dtype=torch.bfloat16),
        (*MATRICES, scales(COLUMNS, dtype=torch.bfloat16), scales(ROWS)),
    ),
    "no rows": (lambda x, w, column: product(x, w, column), (codes(2, STEPS, K), codes(K, COLUMNS), scales(COLUMNS))),
    "multiples, and a part of the result": (
        lambda x, w, column, row: 2 * of_tokens(x, w, column * 3, row)[1:, :5],
        (*MATRICES, scales(COLUMNS), scales(ROWS)),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_read(name, dynamic):
    function, given = PRODUCTS[name]
    traced = Traced(function, *given, decompose=False, dynamic=dynamic)
    index = fresh_index(traced.out)
    found = quantised_product(resolve(traced.out, index))
    sides = [(side.origin.name, [scale.origin.name for scale in side.scales.by]) for side in (found.left, found.right)]
    assert sides == [("x", ["row"] if len(given) == 4 else []), ("w", ["column"])]
    wanted, dims = traced.values[traced.out], (*index, *found.axes)
    assert {side.dtype for side in (found.left, found.right)} == {wanted.dtype}
    actual = found.factor * (scaled(traced, found.left, dims) * scaled(traced, found.right, dims)).sum(-1)
    agree(actual.to(wanted.dtype), wanted)


def option(x=MATRICES[0], w=MATRICES[1], column=None, **options):
    """Operands of a call, with one that is not read."""
    return x, w, scales(COLUMNS) if column is None else column, options


PRODUCT_REFUSALS = {
    "the projection has a bias, which the fused operators do not support": option(bias=codes(COLUMNS).int()),
    "npu_quant_matmul adds an offset to its result": option(offset=scales(COLUMNS)),
    "npu_quant_matmul has a scale for its result, y_scale": option(y_scale=codes(COLUMNS).long()),
    "npu_quant_matmul gives torch.int8; torch.bfloat16 and torch.float32 are read": option(output_dtype=None),
    "npu_quant_matmul gives torch.float16; torch.bfloat16 and torch.float32 are read": option(
        output_dtype=torch.float16
    ),
    "the scale of npu_quant_matmul is torch.int64; torch.float32 and torch.bfloat16 are read": option(
        column=codes(COLUMNS).long()
    ),
    "npu_quant_matmul multiplies torch.int8 by torch.int32; torch.int8 by torch.int8 is read": option(
        codes(ROWS, 256), codes(256, 1).int(), codes(1, COLUMNS).long(), output_dtype=torch.bfloat16
    ),
    "npu_quant_matmul multiplies torch.float8_e4m3fn by torch.float8_e4m3fn; torch.int8 by torch.int8 is read": option(
        *(value.to(torch.float8_e4m3fn) for value in MATRICES)
    ),
    f"npu_quant_matmul reads a tensor as another dtype, x2_dtype={INT4}": option(w=codes(K, 4), x2_dtype=INT4),
    "npu_quant_matmul has scales of groups, group_sizes=[1, 128, 128]": option(
        codes(ROWS, 256), codes(256, 128), scales(2, 1), pertoken_scale=scales(ROWS, 2), group_sizes=[1, 128, 128]
    ),
    "the scale of npu_quant_matmul is [2, 8]; one number per column is read": option(
        column=scales(2, COLUMNS), group_sizes=[0, 0, 0]
    ),
    "pertoken_scale of npu_quant_matmul is [3] for x1 [2, 3, '*']; one number per row of a matrix is read": option(
        codes(BATCH, STEPS, K), pertoken_scale=scales(STEPS)
    ),
    "pertoken_scale of npu_quant_matmul is [1] for x1 [6, '*']; one number per row of a matrix is read": option(
        pertoken_scale=scales(1)
    ),
}


@pytest.mark.parametrize("sentence", PRODUCT_REFUSALS)
def test_a_product_is_refused(sentence):
    *tensors, options = PRODUCT_REFUSALS[sentence]
    (out,) = nodes(lambda tensors, options: [product(*tensors, **options)], tensors, options)
    with pytest.raises(NoMatch) as refusal:
        quantised_product(resolve(out, fresh_index(out)))
    assert str(refusal.value) == sentence


def test_torch_npu_is_told_apart_by_its_namespace():
    other = torch.library.Library("mla_fx_test", "DEF")
    other.define("npu_quant_matmul(Tensor x, Tensor w, Tensor scale) -> Tensor")
    other.impl("npu_quant_matmul", lambda x, w, scale: (x.float() @ w.float()) * scale, "CompositeExplicitAutograd")
    out = nodes(torch.ops.mla_fx_test.npu_quant_matmul.default, *MATRICES, scales(COLUMNS))
    with pytest.raises(NoMatch, match="expected a matrix product, found npu_quant_matmul"):
        quantised_product(resolve(out, fresh_index(out)))


# --- tokens ----------------------------------------------------------------------------------------------------------


def quantised(x, **options):
    """Codes, and a scale for each, as a product has them."""
    found, scale = npu.npu_dynamic_quant(x, **options)
    return found, scale.unsqueeze(-1)


def with_scale(found, scale):
    """The element of codes that carries their scale, as an operand of a product does."""
    index = fresh_index(found)
    return replace(resolve(found, index), scales=Scales((operand(scale, index),), torch.float32)), index


def each(move, x):
    return [move(value) for value in quantised(x)]


def but_scale(change, *called):
    """The codes of a call, and a change of its scale."""
    found, scale = called
    return found, change(scale)


TOKENS = {
    "in sequences": lambda x: quantised(x),
    "in rows": lambda x: each(lambda value: value.flatten(0, 1), x),
    "transposed": lambda x: each(lambda value: value.transpose(0, 1), x.transpose(0, 1)),
    "without the first": lambda x: each(lambda value: value[:, 1:], x),
    "multiples": lambda x: but_scale(lambda scale: scale * 3, *quantised(x * 0.5)),
    "with defaults": lambda x: quantised(x, dst_type=torch.int8, quant_mode="pertoken", dst_type_max=0.0),
}
IN_GROUPS = {"in groups": lambda x: each(lambda value: value.unflatten(-1, (-1, min(4, value.shape[-1]))), x)}


@pytest.mark.parametrize("name, dynamic", [*itertools.product(TOKENS, (False, True)), ("in groups", False)])
def test_tokens_are_read(name, dynamic):
    """A code is no further than half a step from the value that was read."""
    traced = Traced((TOKENS | IN_GROUPS)[name], dense(BATCH, STEPS, K), decompose=False, dynamic=dynamic)
    element, index = with_scale(*traced.out)
    found, (scale,) = quantised_tokens(element), element.scales.by
    assert (found.value.origin.name, found.differences, found.whole) == ("x", (), ())
    assert {axis for part in found.over for axis in part.axes} == element.axes - scale.axes
    steps = traced.read(scale, *index)
    distance = scaled(traced, element, index) - traced.read(found.value, *index)
    assert (steps > 0).all() and (distance.abs() <= 0.5001 * steps).all()


ELSEWHERE = "the scale of the codes of npu_dynamic_quant is not that of the same call, but "
ANOTHER_TOKEN = "codes of npu_dynamic_quant are multiplied by the scale of another token"
TOKEN_REFUSALS = [
    (lambda x, y: (quantised(x)[0], quantised(y)[1]), ELSEWHERE + "getitem_3"),
    (lambda x, y: (quantised(x)[0], y.abs().amax(-1, keepdim=True)), ELSEWHERE + "amax"),
    (lambda x, y: (quantised(x)[0], quantised(x)[0][..., :1].float()), ELSEWHERE + "_to_copy"),
    (lambda x, y: (quantised(x)[0][:, 1:], quantised(x)[1][:, :-1]), ELSEWHERE + "getitem_3"),
    (lambda x, y: but_scale(lambda scale: scale[:, 1:2], *quantised(x)), ANOTHER_TOKEN),
    (lambda x, y: but_scale(lambda scale: scale.transpose(0, 1), *quantised(x[:, :BATCH])), ANOTHER_TOKEN),
    (
        lambda x, y: each(lambda value: value[..., : K // 2], x),
        "a part of a token is read that npu_dynamic_quant quantised as a whole",
    ),
    (
        lambda x, y: but_scale(lambda scale: scale.to(torch.bfloat16).float(), *quantised(x)),
        "the scale of npu_dynamic_quant is rounded to torch.bfloat16",
    ),
    (
        lambda x, y: quantised(x, smooth_scales=y[0, 0]),
        "npu_dynamic_quant multiplies tokens by smooth_scales; multiply them before",
    ),
    (
        lambda x, y: quantised(x, group_index=torch.tensor([6], dtype=torch.int32)),
        "npu_dynamic_quant has groups of tokens, group_index",
    ),
    (
        lambda x, y: quantised(x[:, :1], quant_mode="perchannel"),
        "npu_dynamic_quant has quant_mode='perchannel'; 'pertoken' is read",
    ),
    (
        lambda x, y: quantised(x, dst_type=torch.float8_e4m3fn),
        "npu_dynamic_quant quantises to dst_type=24; torch.int8 is read",
    ),
    (lambda x, y: quantised(x, dst_type_max=7.0), "npu_dynamic_quant has dst_type_max=7; codes up to 127 are read"),
]


@pytest.mark.parametrize("spelling, sentence", TOKEN_REFUSALS)
def test_tokens_are_refused(spelling, sentence):
    element, _ = with_scale(*nodes(spelling, dense(BATCH, STEPS, K), dense(BATCH, STEPS, K) + 1))
    with pytest.raises(NoMatch) as refusal:
        quantised_tokens(element)
    assert str(refusal.value) == sentence


# --- layers ----------------------------------------------------------------------------------------------------------

DOWN = ("q_a", "q_b", "kv_a")


def multiplied(found, scale, w, **options):
    options |= {"pertoken_scale": scale.flatten(), "output_dtype": w.scales.dtype}
    return product(found.flatten(0, -2), w.codes.t(), w.scales, **options).unflatten(0, found.shape[:-1])


def of_calls(x, w):
    """Each projection quantises its tokens, unless they are codes with their scales."""
    return multiplied(*(x if isinstance(x, tuple) else npu.npu_dynamic_quant(x)), w)


class Once(Quantised):
    """Hidden states are quantised once, for two projections."""

    def forward(self, x, *rest):
        return super().forward(npu.npu_dynamic_quant(x), *rest)


class Joined(Quantised):
    """vllm-ascend: the projections of hidden states have one weight."""

    def __init__(self):
        super().__init__(of_calls, by_rows, *DOWN)
        self.register_buffer("down_codes", torch.cat((self.q_a_codes, self.kv_a_codes)))
        self.register_buffer("down_scales", torch.cat((self.q_a_scales, self.kv_a_scales)))

    def forward(self, x, *rest):
        return super().forward(self.multiply(x, Stored(self.down_codes, self.down_scales)), *rest)

    def project(self, x, name):
        if name in ("q_a", "kv_a"):
            return x[..., :HCQ] if name == "q_a" else x[..., HCQ:]
        return super().project(x, name)


LAYERS = {
    "the query's latent": (lambda: Quantised(of_calls, by_rows, "q_b"), 1),
    "all": (lambda: Once(of_calls, by_rows, *DOWN), 2),
    "all, each of its own call": (lambda: Quantised(of_calls, by_rows, *DOWN), 2),
    "all, of one weight": (Joined, 2),
}


def in_dtype(layer, dtype):
    layer = copy.deepcopy(layer)
    for value in (*layer.parameters(), *layer.buffers()):
        value.data = value.data.to(dtype) if value.is_floating_point() else value.data
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_one_prolog(name, tmp_path):
    """It takes the codes of hidden states from the program, and quantises the query's latent itself."""
    build, mode = LAYERS[name]
    report = report_of(build(), dump=str(tmp_path))
    assert report.fused == {PROLOG: 1, ATTENTION: 1}, str(report)
    (index,) = tmp_path.glob("*/index.md")
    file = re.search(r"^\| clean up \|.*\((\S+)\)", index.read_text(), re.MULTILINE)[1]
    graph = index.with_name(file).read_text()
    calls = [graph.count(f"npu.{name}(") for name in ("npu_dynamic_quant", "npu_quant_matmul")]
    assert f"weight_quant_mode={mode}" in graph and calls == [mode - 1, 0]


@pytest.mark.parametrize("name", LAYERS)
def test_as_exact_in_bfloat16_as_eager_mode(name):
    layer = in_dtype(LAYERS[name][0](), torch.bfloat16)
    exact, theirs = in_dtype(layer, torch.float32), copy.deepcopy(layer)
    ours, eager = compiled(layer)(*given(torch.bfloat16)), theirs(*given(torch.bfloat16))
    assert mla_fx.last_report().fused == {PROLOG: 1, ATTENTION: 1}
    wanted = exact(*(value.float() if value.is_floating_point() else value for value in given(torch.bfloat16)))
    for own, near, true in (
        (ours, eager, wanted),
        (layer.kv_cache, theirs.kv_cache, exact.kv_cache),
        (layer.kr_cache, theirs.kr_cache, exact.kr_cache),
    ):
        assert (own.float() - true).norm() <= 2 * (near.float() - true).norm()


@pytest.mark.parametrize("names", [("kv_b",), (*DOWN, "kv_b")], ids=["alone", "all"])
def test_keys_and_values(names):
    """Attention is over the latents that the call quantises."""
    report = report_of(Quantised(of_calls, by_rows, *names))
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)


def of_doubled_scales(x, w):
    """The scale comes from a call for other tokens."""
    return multiplied(npu.npu_dynamic_quant(x)[0], npu.npu_dynamic_quant(x * 2)[1], w)


def of_scales_beside(x, w):
    return multiplied(npu.npu_dynamic_quant(x)[0], x.abs().amax(-1) / 127, w)


def with_bias(x, w):
    return multiplied(*npu.npu_dynamic_quant(x), w, bias=torch.arange(len(w.scales), dtype=torch.int32))


def smoothed(x, w):
    return multiplied(*npu.npu_dynamic_quant(x, smooth_scales=torch.linspace(0.5, 1.5, x.shape[-1])), w)


class OtherScales(Once):
    """Keys and values are projected from the codes of the query, with scales of other tokens."""

    def rows(self, x):
        return super().rows((x[0], x[1].flip(1)))


SMOOTHED = "npu_dynamic_quant multiplies tokens by smooth_scales"
TWINS = {
    "a scale of another call": (lambda: Quantised(of_doubled_scales, by_rows, "q_b"), ELSEWHERE),
    "a scale of no call": (lambda: Quantised(of_scales_beside, by_rows, "q_b"), ELSEWHERE),
    "smooth scales": (lambda: Quantised(smoothed, by_rows, "q_b"), SMOOTHED),
    "a bias": (lambda: Quantised(with_bias, by_rows, "q_b"), "the projection has a bias"),
    "scales of other tokens": (lambda: OtherScales(of_calls, by_rows, *DOWN), "token_x is read in two different ways"),
}


@pytest.mark.parametrize("name", TWINS)
def test_near_twins_have_no_prolog(name):
    build, reason = TWINS[name]
    report = report_of(build())
    assert report.fused == {KEY_SIDE: 1, ATTENTION: 1}, str(report)
    assert [miss.pattern for miss in report.misses if reason in miss.reason] == ["mla_prolog"], str(report)
