"""The largest magnitude over some dimensions, in several spellings; and values that only look like one."""

import pytest
import torch
from lib.traced import Traced, dense

from mla_fx.errors import NoMatch
from mla_fx.readings.codes.tokens import largest
from mla_fx.readings.element import resolve
from mla_fx.readings.views import fresh_index

X, OTHER = dense(3, 4), dense(3, 4)

SPELLINGS = {
    "of magnitudes": lambda x, y: x.abs().amax(-1),
    "with its place": lambda x, y: x.abs().max(-1).values,
    "a norm": lambda x, y: torch.linalg.vector_norm(x, torch.inf, -1),
    "of both ends": lambda x, y: torch.maximum(-x.amin(-1), x.amax(-1)),
    "of both ends, bounded": lambda x, y: torch.maximum(
        -torch.minimum(x.amin(-1), torch.zeros(3)), torch.maximum(x.amax(-1), torch.zeros(3))
    ),
}
OTHERS = {
    "signed": lambda x, y: x.amax(-1),
    "negative": lambda x, y: (-x.abs()).amax(-1),
    "both ends of two values": lambda x, y: torch.maximum(-x.amin(-1), y.amax(-1)),
    "ends over different dimensions": lambda x, y: torch.maximum(-x.amin((0, 1)), x.amax(1)),
    "ends over more dimensions": lambda x, y: torch.maximum(-x.amin(1), x.amax((0, 1))),
}


def read(function):
    traced = Traced(function, X, OTHER, decompose=False)
    return largest(resolve(traced.out, fresh_index(traced.out)))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_largest_magnitude_is_read(name):
    value, over = read(SPELLINGS[name])
    assert value.origin.name == "x" and value.index[1] == over[0] and abs(value.factor) == 1.0


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_are_refused(name):
    with pytest.raises(NoMatch, match="expected the largest magnitude"):
        read(OTHERS[name])
