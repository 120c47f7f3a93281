"""Values bounded by numbers or by a tensor, in either order of operands; and the walk to what computes a value."""

import pytest
import torch
from lib.traced import Traced, agree, dense

from mla_fx.errors import NoMatch
from mla_fx.readings.bounds import Bounds, bounded, clipped, unbounded
from mla_fx.readings.element import computed_between, computed_from, resolve
from mla_fx.readings.views import fresh_index

X, BOUND = dense(3, 4), dense(3, 1)
HALF = torch.full((), 0.5)

BY_NUMBERS = {
    "both": (Bounds(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "from below": (Bounds(low=-0.5), lambda x: x.clamp_min(-0.5)),
    "from above": (Bounds(high=0.5), lambda x: x.clamp(max=0.5)),
    "the larger": (Bounds(low=0.5), lambda x: torch.maximum(x, HALF)),
    "the smaller, turned": (Bounds(high=0.5), lambda x: torch.minimum(HALF, x)),
}
BY_TENSORS = {
    "clamped": (True, lambda x, b: x.clamp(-b, b)),
    "from above last": (True, lambda x, b: torch.minimum(torch.maximum(x, -b), b)),
    "from below last": (False, lambda x, b: torch.maximum(-b, torch.minimum(b, x))),
    "in turn": (False, lambda x, b: x.clamp(max=b).clamp(min=-b)),
}
OTHERS = {
    "to one end": lambda x, b: torch.minimum(x, b),
    "to other ends": lambda x, b: x.clamp(-2 * b, b),
    "to one end twice": lambda x, b: x.clamp(max=b).clamp(max=-b),
}


def element_of(traced):
    return resolve(traced.out, fresh_index(traced.out))


@pytest.mark.parametrize("name", BY_NUMBERS)
def test_bounds_that_are_numbers(name):
    wanted, function = BY_NUMBERS[name]
    traced = Traced(lambda x: function(x.sin()), X, decompose=False)
    value, found = bounded(traced.out)
    assert found == wanted
    numbers = torch.tensor([found.of(number) for number in traced.values[value].flatten().tolist()])
    agree(numbers, traced.values[traced.out].flatten())
    assert unbounded(element_of(traced)).origin is value


@pytest.mark.parametrize("name", BY_TENSORS)
def test_bounds_that_are_plus_and_minus_a_tensor(name):
    is_high_last, function = BY_TENSORS[name]
    traced = Traced(function, X, BOUND)
    found = clipped(element_of(traced))
    assert (found.value.origin.name, found.bound.origin.name, found.is_high_last) == ("x", "b", is_high_last)
    assert bounded(traced.out) is None


@pytest.mark.parametrize("name", OTHERS)
def test_bounds_that_are_two(name):
    with pytest.raises(NoMatch, match="values are clipped to two bounds, expected plus and minus one"):
        clipped(element_of(Traced(OTHERS[name], X, BOUND)))


def test_bounds_after_bounds():
    assert Bounds(-128, 127).after(Bounds(-300, 5)) == Bounds(-128, 5)
    assert Bounds(low=300).after(Bounds(-128, 127)) == Bounds(300, 300)


# --- what a value is computed from -----------------------------------------------------------------------------------


def far(x, y):
    near = x.cos()
    return (near.sin() * HALF + y) * near


def names(nodes):
    return [node.name for node in nodes]


def test_what_a_value_is_computed_from_is_nearest_first():
    out = Traced(far, X, X).out
    found = names(computed_from(out))
    assert found[0] == out.name
    assert sorted(found[1:3]) == ["add", "cos"]
    assert found.index("mul") < found.index("sin")
    assert len(found) == len(set(found))


def test_nothing_behind_an_end_is_found():
    out = Traced(far, X, X).out
    assert "x" not in names(computed_from(out, lambda node: node.name in ("sin", "cos")))
    assert "sin" in names(computed_from(out, lambda node: node.name in ("sin", "cos", out.name)))


def test_between_two_values_are_neither_stops_nor_constants():
    traced = Traced(far, X, X)
    (cos,) = (node for node in traced.graph.nodes if node.name == "cos")
    between = set(names(computed_between(traced.out, {cos})))
    assert between == {traced.out.name, "add", "mul", "sin", "y"}
    assert [*computed_between(cos, {cos})] == []
