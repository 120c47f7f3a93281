"""On a CPU whose library multiplies only float32 fast, bfloat16 is widened in parts, and no loop multiplies scores.

The oracle is the product, or the layer in eager mode, in float64."""

import copy

import pytest
import torch
from lib.kernels import compiled, draw, error
from lib.layers import Layer, Sizes, arguments, in_type
from mla_fx.lowering.cpu import attention, few_coded_rows, few_rows, heads_over_rows, wide_products
from mla_fx.lowering.cpu.attention_over_rows import attend

import mla_fx
from mla_fx.errors import NoMatch
from mla_fx.ops.common import machine
from mla_fx.ops.emitted.attention.arguments import Arguments

pytestmark = pytest.mark.usefixtures("no_gradients")
SIZES = {"hidden": 512, "query_rank": 256, "rank": 128, "nope": 64, "rope": 32, "value": 64}


@pytest.fixture(autouse=True)
def slow_bfloat16(monkeypatch):
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: False)


@pytest.mark.parametrize("part", [1, 1000, wide_products.PART])
@pytest.mark.parametrize("shape", [(17, 96, 50), (3, 20, 64, 33), (5, 32, 0), (0, 32, 7)], ids=str)
def test_it_is_a_product(monkeypatch, part, shape):
    monkeypatch.setattr(wide_products, "PART", part)
    monkeypatch.setattr(wide_products, "ROWS", 7)
    *batch, count, inner, columns = shape
    rows, weight = draw(*batch, count, inner).bfloat16(), draw(*batch, columns, inner).bfloat16().mT
    found, exact = wide_products.product(rows, weight), rows.double() @ weight.double()
    assert found.shape == exact.shape and found.dtype == torch.bfloat16 and found.is_contiguous()
    torch.testing.assert_close(found, exact.to(found.dtype), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_dtypes_are_left_to_the_library(dtype):
    rows, weight = draw(20, 32).to(dtype), draw(32, 8).to(dtype)
    assert torch.equal(wide_products.product(rows, weight), rows @ weight)


def test_products_of_many_rows_are_taken(monkeypatch):
    rows, weight = draw(17, 512).bfloat16(), draw(2048, 512).bfloat16().mT
    codes = weight.clamp(-1, 1).mul(100).to(torch.int8).contiguous().mT.contiguous().mT
    coded = rows, codes, None, None, *codes.shape
    assert few_rows.lower(rows, weight) is few_rows.few_rows
    assert few_coded_rows.lower(*coded) is few_coded_rows.few_coded_rows
    assert error(few_rows.run(rows, weight), rows.double() @ weight.double()) <= 2**-8
    assert error(few_coded_rows.run(*coded), rows.double() @ codes.double()) <= 2**-8
    with pytest.raises(NoMatch, match="a library multiplies such rows faster"):
        few_rows.lower(rows[:0], weight)
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: True)
    for refused in (lambda: few_rows.lower(rows, weight), lambda: few_coded_rows.lower(*coded)):
        with pytest.raises(NoMatch):
            refused()


def test_no_loops_for_few_scores(monkeypatch):
    query, latents = draw(1, 1, 2, 32).bfloat16(), draw(1, 8, 32).bfloat16()
    weights = {"weight_uk": draw(2, 32, 32).bfloat16(), "weight_uv": draw(2, 32, 32).bfloat16()}
    few = Arguments(query, None, latents, None, scale=0.2)
    heads = Arguments(query, None, latents, None, scale=0.2, **weights)
    assert attention.lower(few) is attend and heads_over_rows.is_fast(heads)
    assert attention.lower(heads) is attention.chosen_by_call
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: True)
    for a in (few, heads):
        with pytest.raises(NoMatch):
            attention.lower(a)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "context"), [(1, 64), (40, 64), (80, 80)])
def test_a_layer(tokens, context):
    sizes = Sizes(tokens=tokens, context=context, **SIZES)
    layer, given = Layer(sizes), arguments(sizes, first=context - tokens)
    exact_given = copy.deepcopy(in_type(given, torch.bfloat16))
    module, eager_given, own_given = copy.deepcopy(layer).bfloat16(), *(copy.deepcopy(exact_given) for _ in range(2))
    exact_given = in_type(exact_given, torch.float64)
    exact, plain = module.double()(*exact_given), copy.deepcopy(layer).bfloat16()(*eager_given)
    module = copy.deepcopy(layer).bfloat16()
    found, code, _ = compiled(module, *own_given)
    assert error(found, exact) <= 2 * error(plain, exact)
    for own, eager, right in zip(own_given[-1], eager_given[-1], exact_given[-1], strict=True):
        assert error(own, right) <= 2 * error(eager, right)
    assert "few_rows" in code and mla_fx.last_report().fused, code
