"""The part of this process, behind what joins the parts of a group."""

import operator

import pytest
import torch
from torch.fx import Graph

from mla_fx.readings.concatenation import own_part

pytest.importorskip("torch.distributed._functional_collectives")  # which declares the operators
aten, collectives = torch.ops.aten, torch.ops._c10d_functional


@pytest.fixture
def part():
    return Graph().placeholder("part")


def gathered(part):
    """What two processes have, along a dimension of its own."""
    call = part.graph.call_function
    everyone = call(collectives.all_gather_into_tensor.default, (part, 2, "group"))
    return call(collectives.wait_tensor.default, (everyone,))


def test_parts_that_are_joined_by_heads(part):
    call = part.graph.call_function
    parts = call(aten.split.Tensor, (gathered(part), 1))
    pieces = [call(operator.getitem, (parts, rank)) for rank in (0, 1)]
    joined = call(aten.cat.default, (pieces, 2))
    assert own_part(call(aten.permute.default, (joined, [0, 2, 1, 3]))) is part


def test_parts_that_are_read_as_they_lie(part):
    assert own_part(gathered(part)) is part


def test_values_of_one_process(part):
    """Sums of a group, values that are not waited for, and what is no part at all, stay what they are."""
    call = part.graph.call_function
    summed = call(collectives.wait_tensor.default, (call(collectives.all_reduce.default, (part, "sum", "group")),))
    started = call(collectives.all_gather_into_tensor.default, (part, 2, "group"))
    for value in (summed, started, part, call(aten.mul.Tensor, (gathered(part), 2.0))):
        assert own_part(value) is value
