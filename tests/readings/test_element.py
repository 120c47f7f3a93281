"""Elements that resolve no further, and elements that are no constants, sums or products."""

import math

import pytest
import torch
from lib.traced import D, S, T, Traced, assert_resolves, dense, refused, rows

from mla_fx.readings.algebra import as_product, as_sum
from mla_fx.readings.axes import Axis, of_axis
from mla_fx.readings.constant import constant
from mla_fx.readings.contraction import contraction
from mla_fx.readings.element import element_of, resolve
from mla_fx.readings.integers import integer_sum
from mla_fx.readings.reading import renamed

aten = torch.ops.aten


def in_every_second(x):
    return x.slice_scatter(x[..., ::2] + 100, -1, 0, D, 2)


VALUES = {  # elements that resolve no further, because the next step would read something else
    "whole numbers": ("_to_copy", lambda x: (x * 0.7).to(torch.int64).to(torch.float32)),
    "whole numbers copied": ("copy", lambda x: aten.copy.default(x, (x * 0.7).to(torch.int64))),
    "bytes that wrap": ("mul", lambda x: x.abs().to(torch.uint8).mul(200)),
    "repeated": ("repeat", lambda x: x.repeat(1, 2)),
    "every second written": ("slice_scatter", in_every_second),
    "some of every second written": (
        "slice_scatter", lambda x: x.slice_scatter(x[..., :2] + 100, -1, 0, 4, 2)[..., ::2]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_an_element_is_not_followed_through(name):
    origin, function = VALUES[name]
    element = assert_resolves(Traced(function, dense(S, D) * 3, decompose=False))
    assert element.origin.target._opname == origin


UNKNOWN = {  # of x [s0, s1], where s0 is 3 or more: positions that may count from the end
    "window": lambda x: rows(x)[:, x.shape[0] - 3 :],
    "part": lambda x: rows(x)[:, x.shape[0] - 3 : x.shape[0] - 1],
    "token": lambda x: rows(x).select(1, x.shape[0] - 3),
    "rows written": lambda x: rows(x).slice_scatter(rows(x)[:, :1] + 100, 1, x.shape[0] - 3, x.shape[0] - 2),
    "row written": lambda x: rows(x).select_scatter(rows(x)[:, 0] + 100, 1, x.shape[0] - 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 5), (4, 5)], ids=str)
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_position_that_may_count_from_the_end(name, shape):
    values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    assert_resolves(Traced(UNKNOWN[name], values, dynamic=True))


def test_a_copy_to_another_type_rounds():
    traced = Traced(lambda x: aten.copy.default(x.bfloat16(), x).float(), dense(D), decompose=False)
    assert element_of(traced.out).roundings == (torch.bfloat16,)


def test_an_element_read_across_a_boundary():
    traced = Traced(lambda x: x.view(12).clone(), dense(3, 4))
    axis = Axis(12)
    element = resolve(traced.out, (of_axis(axis),))
    across = {axis: of_axis(Axis(4), 3)}
    for read in (element.at, element.renamed, lambda names: renamed(element.index[0], names)):
        with refused("read across a boundary"):
            read(across)


def test_a_factor_is_not_left_behind():
    element = element_of(Traced(lambda x: x * 2, dense(D)).out)
    with refused("the graph input x is multiplied by a number, 2"):
        print(element.node)


def test_flags_and_complex_numbers_are_no_constants():
    traced = Traced(
        lambda x: [torch.full((), 2, dtype=torch.complex64), x > torch.zeros((), dtype=torch.bool)], dense(D)
    )
    number, compared = traced.out
    assert constant(True) is None
    assert constant(number) is None
    assert [constant(value) for value in compared.all_input_nodes] == [None, None]


def test_a_whole_number_that_a_float_may_not_hold_is_no_constant():
    assert constant(2**53) == 2.0**53
    assert constant(2**53 + 1) is None and constant(-(2**60)) is None


def test_a_whole_number_cast_from_a_float_is_not_followed():
    found = integer_sum(element_of(Traced(lambda x: (x * 4).long() + 3, dense(S)).out))
    ((summand, times),) = found.elements
    assert (times, found.index.offset) == (1, 3) and summand.node.meta["val"].dtype == torch.int64


def test_a_sum_that_is_too_long():
    def function(x, y):
        for _ in range(120):
            x = x + y
        return x

    with refused("a sum or product of more than 100 operations"):
        as_sum(element_of(Traced(function, dense(D), dense(D)).out))


def test_the_root_of_a_negative_number():
    with refused("-2 to the power 0.5 is not a number"):
        as_product(element_of(Traced(lambda x: (x * -2) ** 0.5, dense(D)).out))


@pytest.mark.parametrize("factor", [1e-200, 1e200])
def test_a_product_of_no_finite_multiple(factor):
    with refused("a matrix product is multiplied by (0|inf)"):
        contraction(element_of(Traced(lambda x, w: (x * factor) @ (w * factor), dense(S, D), dense(D, T)).out))
