"""Values bounded by numbers, in either order of operands; and the walk to what computes a value."""

import pytest
import torch
from lib.traced import Traced, agree, dense

from mla_fx.readings.bounds import Bounds, bounded
from mla_fx.readings.element import computed_between, computed_from

X, BOUND = dense(3, 4), dense(3, 1)
HALF = torch.full((), 0.5)

BY_NUMBERS = {
    "both": (Bounds(-0.5, 0.5), lambda x: x.clamp(-0.5, 0.5)),
    "from below": (Bounds(low=-0.5), lambda x: x.clamp_min(-0.5)),
    "from above": (Bounds(high=0.5), lambda x: x.clamp(max=0.5)),
    "the larger": (Bounds(low=0.5), lambda x: torch.maximum(x, HALF)),
    "the smaller, turned": (Bounds(high=0.5), lambda x: torch.minimum(HALF, x)),
}
@pytest.mark.parametrize("name", BY_NUMBERS)
def test_bounds_that_are_numbers(name):
    wanted, function = BY_NUMBERS[name]
    traced = Traced(lambda x: function(x.sin()), X, decompose=False)
    value, found = bounded(traced.out)
    assert found == wanted
    agree(traced.values[value].clamp(*found), traced.values[traced.out])


def test_bounds_that_are_tensors():
    assert bounded(Traced(lambda x, b: x.clamp(-b, b), X, BOUND).out) is None


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
