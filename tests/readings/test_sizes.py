"""What guards say of sizes is used in proofs: signs of Python's numbers, sums, common factors."""

from types import SimpleNamespace

import pytest
import sympy
import torch
from torch.fx import Graph

from mla_fx.graph.torch_private import make_fx
from mla_fx.readings import sizes
from mla_fx.readings.equal_sizes import AT_MOST, MULTIPLE, unproved
from mla_fx.readings.sizes import at_most, floor_division, ratio, remainders, size_facts, size_of
from mla_fx.readings.views import shape_of


class Environment:
    """A shape environment with only guards, and lower bounds of single symbols."""

    def __init__(self, *guards):
        self.given = guards


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    def is_known(environment, relation):
        return relation == sympy.true or relation in environment.given

    monkeypatch.setattr(sizes, "guards", lambda environment: list(environment.given))
    monkeypatch.setattr(sizes, "is_known", is_known)


def number(name):
    """A Python number that became a symbol: nothing is known of its sign."""
    return sympy.Symbol(name, integer=True)


def size(name):
    return sympy.Symbol(name, integer=True, positive=True)


ONE, TWO, THREE = map(number, ("s1", "s2", "s3"))
ALL, OTHER, PART, TIMES = map(size, ("s7", "s8", "s9", "s10"))


def read(expression):
    """A size of a graph as readings see it."""
    return size_of(SimpleNamespace(node=SimpleNamespace(expr=expression)))


def proved(small, large, *guards):
    with size_facts(Environment(*guards)):
        return at_most(read(small), read(large))


POSITIVE = tuple(sympy.Ge(symbol, 1) for symbol in (ONE, TWO, THREE))
SUM = sympy.Eq(ONE + TWO + THREE, ALL)


@pytest.mark.parametrize("guards, expected", [((SUM, *POSITIVE), True), ((SUM, *POSITIVE[:2]), False), ((SUM,), False)])
def test_a_size_that_is_a_sum_of_numbers(guards, expected):
    """The lengths of sequences add up to the tokens: a part of them ends within, if no other is less than nothing."""
    assert proved(ONE + TWO, ALL, *guards) is expected


@pytest.mark.parametrize("guards", [(SUM, sympy.Eq(ALL, OTHER)), (sympy.Eq(ALL, OTHER), SUM)])
def test_a_size_that_is_another_that_is_a_sum(guards):
    assert proved(ONE + TWO, OTHER, *guards, *POSITIVE)


def test_twins_of_a_sum():
    assert not proved(ONE + TWO + 1, ALL, SUM, *POSITIVE[:2], sympy.Ge(THREE, 0))
    assert not proved(ALL, ONE + TWO, SUM, *POSITIVE)


def test_a_bound_on_a_size_that_is_another():
    """Guards speak of a size under the name that it had before it was found equal to another."""
    guards = sympy.Eq(ALL, OTHER), sympy.Le(ONE + TWO, ALL), *POSITIVE
    assert proved(ONE + TWO, OTHER, *guards)
    assert not proved(ONE + TWO, OTHER, *guards[1:])


def test_sizes_rounded_down():
    rounded = floor_division()
    for step, start in ((2, 0), (3, 0), (3, 2)):
        length = rounded(ALL - start + step - 1, step)
        assert proved(start + step * (length - 1) + 1, ALL)
        assert not proved(start + step * (length - 1) + 2, ALL)
    assert proved(PART * rounded(ALL, PART), ALL)
    assert not proved(ALL, PART * rounded(ALL, PART))
    assert not proved(ONE * rounded(ALL, TWO), ALL)


def test_sizes_with_common_factors():
    assert proved(ALL, PART * TIMES, sympy.Eq(56 * ALL, 56 * PART * TIMES))
    assert not proved(ALL, PART * TIMES, sympy.Eq(56 * ALL, 28 * PART * TIMES * OTHER))


@pytest.mark.parametrize("total, parts", [(ALL, PART), (ALL, ONE)], ids=["of a size", "of a number"])
def test_remainders_of_common_factors(total, parts):
    """32 * tokens are known to be a multiple of 32 * sequences."""
    mod, _ = remainders()
    environment = Environment(sympy.Eq(mod(32 * total, 32 * parts), 0, evaluate=False), *POSITIVE)
    with size_facts(environment):
        assert ratio(read(total), read(parts)) is not None
    assert ratio(total, parts) is None


def test_what_is_not_known_is_written_as_the_model_would():
    graph = Graph()
    graph.placeholder("x").meta["val"] = torch.empty(2, 3)
    assert unproved(graph, 4, MULTIPLE, 3) == ""
    told = unproved(graph, ALL, MULTIPLE, PART * TIMES)
    assert told == ": s7 % (s10*s9) == 0 is not known; torch._check(s7 % (s10*s9) == 0) in the model says so"


def test_symbols_are_called_as_the_inputs_that_have_them():
    def function(x, y):
        return x.flatten(), y.sum()

    made = make_fx(function, tracing_mode="symbolic")(torch.randn(5, 7), torch.randn(11))
    x, y = made.graph.find_nodes(op="placeholder")
    (rows, _), (count,) = shape_of(x), shape_of(y)
    told = unproved(made.graph, rows + 1, AT_MOST, count)
    names = f"{rows} being x_1.shape[0], {count} being y_1.shape[0]"
    check = "torch._check((x_1.shape[0] + 1) <= y_1.shape[0]) in the model says so"
    assert told == f": ({rows + 1}) <= {count} is not known, {names}; {check}"
