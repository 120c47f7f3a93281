"""Sums, products and matrix products against an independent oracle."""

import math

import pytest
import torch
from lib.traced import B, D, N, S, T, Traced, agree, dense, refused, sum_of
from torch.nn import functional as F  # noqa: N812

from mla_fx.errors import NoMatch
from mla_fx.readings.algebra import as_product, as_sum
from mla_fx.readings.contraction import contraction, segments
from mla_fx.readings.element import element_of, resolve
from mla_fx.readings.views import fresh_index

# --- sums and products ------------------------------------------------------------------------------------------------


def test_a_sum_is_flat_with_signs_and_constants():
    traced = Traced(lambda x, y: 2 * (x - y + 3) - 0.5 * (y + 1), dense(D), dense(D) + 1)
    total = as_sum(element_of(traced.out))
    assert total.constant == 5.5
    assert [(term.origin.name, term.factor) for term in total.terms] == [("x", 2.0), ("y", -2.0), ("y", -0.5)]


def test_a_product_is_flat_with_powers():
    traced = Traced(lambda x, y: 3 * x.square() / (y * 2).sqrt(), dense(D), dense(D).abs())
    found = as_product(element_of(traced.out))
    assert [(factor.node.name, power) for factor, power in found.factors] == [("x", 2.0), ("y", -0.5)]
    assert found.number == pytest.approx(3 / math.sqrt(2))


@pytest.mark.parametrize("spelling", [lambda x: (x * x).sqrt(), lambda x: (x**2) ** 0.5])
def test_the_root_of_a_square_is_no_product(spelling):
    found = as_product(element_of(Traced(spelling, dense(D)).out))
    assert all((factor.node.name, power) != ("x", 1.0) for factor, power in found.factors), "|x| was read as x"


def test_division_by_zero_is_left_alone():
    found = as_product(element_of(Traced(lambda x: x / 0, dense(D)).out))
    assert len(found.factors) == 1


# --- contraction ------------------------------------------------------------------------------------------------------


PRODUCTS = {
    "matmul": (lambda x, w: x @ w, (B, S, D), (D, T)),
    "linear": (lambda x, w: F.linear(x, w), (B, S, D), (T, D)),
    "linear of one token": (lambda x, w: F.linear(x, w), (1, 1, D), (T, D)),
    "vector": (lambda x, w: x @ w, (D,), (D, T)),
    "matrix vector": (lambda x, w: x @ w, (T, D), (D,)),
    "batched": (lambda x, w: x @ w, (B, N, S, D), (B, N, D, T)),
    "broadcast": (lambda x, w: x @ w, (B, N, S, D), (B, 1, D, T)),
    "transposed": (lambda x, w: x.transpose(1, 2) @ w.transpose(1, 2).mT, (B, S, N, D), (B, T, N, D)),
    "per head": (lambda x, w: torch.einsum("bsnd,ndc->bsnc", x, w), (B, S, N, D), (N, D, T)),
    "scores": (lambda x, w: torch.einsum("bsnd,btd->bsnt", x, w), (B, S, N, D), (B, T, D)),
    "two axes": (lambda x, w: torch.einsum("bsnd,nde->bse", x, w), (B, S, N, D), (N, D, T)),
    "summed": (lambda x, w: (x[..., None] * w).sum(-2), (B, S, D), (D, T)),
    "scaled": (lambda x, w: (x * 0.5) @ (w / -3) * 2, (B, S, D), (D, T)),
    "added to nothing": (
        lambda x, w: torch.baddbmm(torch.full((B, S, T), math.nan), x, w.expand(B, D, T), beta=0, alpha=-0.5),
        (B, S, D),
        (D, T),
    ),
    "through bfloat16": (lambda x, w: (x.bfloat16() @ w.bfloat16()).float(), (B, S, D), (D, T)),
}


@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "whole"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_read(name, decompose):
    function, left, right = PRODUCTS[name]
    traced = Traced(function, dense(*left), dense(*right), decompose=decompose)
    index = fresh_index(traced.out)
    found = contraction(resolve(traced.out, index))
    assert {found.left.node.name, found.right.node.name} == {"x", "w"}
    actual = sum_of(traced, found, index)
    torch.testing.assert_close(actual, traced.values[traced.out], rtol=0.05, atol=0.2 if "bfloat" in name else 1e-4)


def test_a_product_with_joined_operands_is_a_sum_of_products():
    def function(q, k, q_rope, k_rope):
        return torch.cat([q, q_rope], -1) @ torch.cat([k, k_rope], -1).mT

    traced = Traced(function, dense(S, D), dense(T, D), dense(S, 4), dense(T, 4))
    index = fresh_index(traced.out)
    parts = segments(contraction(resolve(traced.out, index)))
    assert [{part.left.node.name, part.right.node.name} for part in parts] == [{"q", "k"}, {"q_rope", "k_rope"}]
    agree(sum(sum_of(traced, part, index) for part in parts), traced.values[traced.out])


NO_PRODUCTS = {
    "half of a bias": (lambda x, w: torch.addmm(x[:, :T], x, w.T, beta=0.5), "the projection has a bias"),
    "a bias": (lambda x, w: F.linear(x, w, w[:, 0]), "the projection has a bias"),
    "elementwise": (lambda x, w: x[0] * w[0], "expected a matrix product, found an elementwise mul"),
    "a sum": (lambda x, w: (x[:, None] + w).sum(-1), "expected a matrix product, found a sum of add"),
    "an input": (lambda x, w: x.clone(), "expected a matrix product, found the graph input x"),
    "a maximum": (lambda x, w: torch.maximum(x[0], w[0]), "expected a matrix product, found maximum"),
}


@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_what_is_no_product_is_refused_with_a_reason(name):
    function, reason = NO_PRODUCTS[name]
    with pytest.raises(NoMatch, match=reason):
        contraction(element_of(Traced(function, dense(S, D), dense(T, D)).out))


def test_a_product_times_a_number_known_at_run_time():
    given = dense(S, T), dense(S, D), dense(D, T)
    traced = Traced(lambda b, x, w: torch.addmm(b, x, w, beta=0), *given, decompose=False)
    traced.out.kwargs = {"beta": 0, "alpha": traced.out.args[0]}
    with refused("a matrix product is multiplied by a number known at run time"):
        contraction(element_of(traced.out))
