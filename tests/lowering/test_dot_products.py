"""A few rows times weights, which Inductor's target computes in its own loops on a CPU: an option, with lines in the
report."""

import contextlib
import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from lib.families import cache_tensors, empty_cache, tiny_model, tokens
from mla_fx.lowering import inductor
from mla_fx.lowering.inductor import dot_products, products_of_copies, small_products, sums_for_rows

import mla_fx
from mla_fx.errors import NoMatch

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("inner", [7, 576, 4096, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_is_multiplied_as_exactly_as_by_a_product(inner, dtype):
    row, weight = torch.randn(1, inner).to(dtype), (torch.randn(5, inner) * inner**-0.5).to(dtype).T
    exact = row.double() @ weight.double()
    error, plain = ((product.double() - exact).abs().max() for product in (dot_products(row, weight), row @ weight))
    assert error <= 2 * plain + torch.finfo(dtype).tiny
    assert dot_products(row, weight).dtype == dtype


@pytest.mark.parametrize("compute", [sums_for_rows, products_of_copies])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_value", [False, True])
def test_heads_are_multiplied_as_exactly_as_by_a_product(compute, dtype, is_value):
    heads, rows, nope, value, rank = 3, 5, 8, 6, 16
    projection = (torch.randn(heads, nope + value, rank) * rank**-0.5).to(dtype)
    weights = projection[:, nope:].mT if is_value else projection[:, :nope]
    left = torch.randn(heads, rows, weights.shape[1]).to(dtype)
    exact = left.double() @ weights.double()
    error, plain = ((product.double() - exact).abs().max() for product in (compute(left, weights), left @ weights))
    assert error <= 2 * plain + torch.finfo(dtype).tiny
    assert compute(left, weights).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_small_products_are_as_exact_as_large_ones(dtype, is_transposed):
    rows, weight = torch.randn(5, 12).to(dtype), torch.randn(7, 12).to(dtype)
    weight = weight.T if is_transposed else weight.T.contiguous()
    exact = rows.double() @ weight.double()
    error, plain = ((product.double() - exact).abs().max() for product in (small_products(rows, weight), rows @ weight))
    slack = exact.abs().max() * 4 * torch.finfo(dtype).eps if dtype == torch.float32 else 0  # sums in another order
    assert error <= 2 * plain + slack
    assert small_products(rows, weight).dtype == dtype


@pytest.mark.parametrize("compute", [dot_products, sums_for_rows, products_of_copies])
def test_codes_are_multiplied_as_they_are_stored(compute):
    heads = () if compute is dot_products else (3,)
    codes = torch.randint(-128, 128, (*heads, 7, 4096), dtype=torch.int8).mT
    rows = torch.randn(*heads, 5, 4096).bfloat16()
    exact = rows.double() @ codes.double()
    products = compute(rows, codes), rows @ codes.bfloat16()
    error, plain = ((product.double() - exact).abs().max() for product in products)
    assert error <= 2 * plain
    assert products[0].dtype == torch.bfloat16


PRODUCTS = {
    dot_products: ((1, 4096), (4096, 5)),
    small_products: ((5, 12), (12, 7)),
    sums_for_rows: ((3, 5, 8), (3, 8, 16)),
    products_of_copies: ((3, 5, 8), (3, 8, 16)),
}
EXTREMES = (math.nan, math.inf, -math.inf, 6e4, -6e4, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", PRODUCTS)
def test_extreme_numbers_meet_as_in_a_product(compute, dtype):
    """Each pair of them, one in the rows and one in the weights: NaN and infinite where a product is."""
    for left, right in itertools.product(EXTREMES, EXTREMES):
        rows, weights = (torch.randn(shape).to(dtype) for shape in PRODUCTS[compute])
        weights = weights.mT.contiguous().mT
        rows[..., 0, 3], weights[..., 3, 2] = left, right
        meant, found = (rows.float() @ weights.float()).to(dtype), compute(rows, weights)
        assert torch.equal(found.isnan(), meant.isnan()) and torch.equal(found.isinf(), meant.isinf())
        torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2, equal_nan=True)


def decoded(batch, *, is_traced=True, **options):
    """Check logits and caches of one step with the graph that Inductor gets, only traced; return what the report says
    about products."""
    model = tiny_model("deepseek_v3", torch.bfloat16, num_hidden_layers=1)
    cache, token = empty_cache(model, "static"), tokens(batch, 1)
    model(tokens(batch, 12), past_key_values=cache)
    theirs, ours, exact = (copy.deepcopy(cache) for _ in range(3))
    for layer in exact.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    wanted = [copy.deepcopy(model).double()(token, past_key_values=exact).logits, *cache_tensors(exact)]
    expected = [model(token, past_key_values=theirs).logits, *cache_tensors(theirs)]
    traced = mock.patch("mla_fx.lowering.inductor.compile_fx_inner", lambda gm, *_, **__: gm.forward)
    with traced if is_traced else contextlib.nullcontext():
        step = torch.compile(model, backend=mla_fx.get_backend(target="inductor", **options))
        found = [step(token, past_key_values=ours).logits, *cache_tensors(ours)]
    for value, eager, right in zip(found, expected, wanted, strict=True):
        error, plain = ((one.double() - right).norm() for one in (value, eager))
        assert error <= 2 * plain
    return [note for note in mla_fx.last_report().notes if " is computed as " in note]


@pytest.fixture
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(inductor, "SMALL", 0)
    monkeypatch.setattr(inductor, "SMALL_FOR_HEADS", 0)


def test_products_of_few_numbers_are_loops():
    assert any(note.startswith("mm is computed as small_products (") for note in decoded(1))


def test_batched_products_of_few_rows_and_numbers_are_loops(monkeypatch):
    assert "bmm is computed as sums_for_rows (5 times)" in decoded(2)
    rows, weights = torch.randn(3, 8, 16).bfloat16(), torch.randn(3, 16, 32).bfloat16()
    assert inductor._of_heads(rows, weights) is sums_for_rows
    monkeypatch.setattr(inductor, "SMALL_FOR_HEADS", 3 * 8 * 16 * 32 - 1)
    for few, others in ((rows, weights), (torch.randn(3, 9, 16).bfloat16(), weights[..., :4].contiguous())):
        with pytest.raises(NoMatch, match="a library reads such weights in their own layout"):
            inductor._of_heads(few, others)


@pytest.mark.parametrize("rows", [torch.randn(1, 12).double(), torch.randn(0, 12), torch.randn(9, 12)])
def test_doubles_and_none_and_many_are_left_to_products(rows):
    with pytest.raises(NoMatch, match="a library multiplies such rows faster"):
        inductor._of_rows(rows, torch.randn(12, 7).to(rows.dtype))


def test_the_report_counts_them(nothing_is_small):
    projections, heads = decoded(1)
    assert projections.startswith("mm is computed as dot_products (") and projections.endswith(" times)")
    assert heads == "bmm is computed as sums_for_rows (2 times)"


def test_several_rows_are_left_to_products_but_those_of_heads(nothing_is_small):
    assert decoded(2) == ["bmm is computed as sums_for_rows (2 times)"]


def test_for_many_rows_weights_of_heads_are_copied_along_their_memory(nothing_is_small):
    assert decoded(9) == ["bmm is computed as products_of_copies"]


@pytest.mark.slow
def test_without_the_option_rows_are_left_to_products():
    assert decoded(1, dot_products=False) == decoded(2, dot_products=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_compiled_steps_are_as_exact_as_eager_ones(batch, nothing_is_small):
    assert decoded(batch, is_traced=False) != []


@pytest.mark.parametrize("is_dumped", [False, True])
def test_the_option_is_a_flag(is_dumped, tmp_path):
    options = {"dump": str(tmp_path)} if is_dumped else {}
    with pytest.raises(mla_fx.OptionError, match="option dot_products is 'no'; it takes False, True"):
        decoded(1, dot_products="no", **options)
