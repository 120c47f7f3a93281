"""Equal calls of equal operands are one value; their near twins are not."""

import pytest
import torch
from lib.traced import D, Traced, dense

from mla_fx.readings.element import resolve
from mla_fx.readings.same_value import same_value
from mla_fx.readings.views import fresh_index


@torch.library.custom_op("tests_same_value::drawn", mutates_args=())
def drawn(table: torch.Tensor) -> torch.Tensor:
    return table * torch.rand(()).item()


drawn.register_fake(torch.empty_like)

TABLE, POSITIONS = dense(8, D), torch.tensor([5, 0, 3])


def angles(positions, base=100.0):
    return torch.outer(positions.float(), base ** -(torch.arange(D) / D)).cos()


def doubled(value):
    """Each of 20 sums has the one before as both operands."""
    for _ in range(20):
        value = value + value.clone()
    return value


EQUAL = {
    "looked up": lambda table, p: (table[p], table[p]),
    "computed": lambda table, p: (angles(p), angles(p)),
    "by its casts": lambda table, p: (table[p].double(), table[p].double()),
    "one of several": lambda table, p: (table[p].split(2, -1)[1], table[p].split(2, -1)[1]),
    "one value": lambda table, p: (table, table),
    "clamped": lambda table, p: (p.clamp(max=4), p.clamp(max=4)),
    "chosen": lambda table, p: (torch.where(p > 4, 0, p), torch.where(p > 4, 0, p)),
    "by many ways": lambda table, p: (doubled(p), doubled(p)),
}
UNLIKE = {
    "another position": lambda table, p: (table[p], table[p + 1]),
    "another table": lambda table, p: (table[p], table.exp()[p]),
    "another number": lambda table, p: (angles(p), angles(p, 100.5)),
    "a number of another sign": lambda table, p: (table[p] + 0.0 * table[:1], table[p] + -0.0 * table[:1]),
    "another type of number": lambda table, p: (p.clamp(min=1), p.clamp(min=1.0)),
    "another operation": lambda table, p: (table[p].cos(), table[p].sin()),
    "another column": lambda table, p: (table[p].cos(), table[p].cos().flip(-1)),
    "another factor": lambda table, p: (table[p].cos(), table[p].cos() * 2),
    "another rounding": lambda table, p: (table[p].cos(), table[p].cos().bfloat16().float()),
    "random": lambda table, p: (torch.rand_like(table), torch.rand_like(table)),
    "another library's": lambda table, p: (drawn(table), drawn(table)),
    "another bound": lambda table, p: (p.clamp(max=4), p.clamp(max=3)),
    "another at the end of many ways": lambda table, p: (doubled(p), doubled(p.clone().clamp(max=4))),
    "written in between": lambda table, p: (p.clamp(max=4), p.add_(1).clamp(max=4)),
    "empty": lambda table, p: (torch.empty_like(table).exp(), torch.empty_like(table).exp()),
}


def pair(function):
    traced = Traced(function, TABLE, POSITIONS, decompose=False)
    index = fresh_index(traced.out[0])
    return [resolve(value, index) for value in traced.out]


@pytest.mark.parametrize("name", EQUAL)
def test_equal_calls(name):
    assert same_value(*pair(EQUAL[name]))


@pytest.mark.parametrize("name", UNLIKE)
def test_near_twins(name):
    assert not same_value(*pair(UNLIKE[name]))


def test_a_long_computation_is_not_followed():
    def repeated(table, p):
        found = []
        for _ in range(2):
            value = table[p]
            for _ in range(60):
                value = value.cos()
            found.append(value)
        return tuple(found)

    assert not same_value(*pair(repeated))
