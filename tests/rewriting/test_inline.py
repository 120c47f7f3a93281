"""Calls that give back what they are made from are not made."""

import pytest
import torch

from mla_fx.graph.torch_private import make_fx
from mla_fx.rewriting.inline import uncut


def last_call(function):
    graph = make_fx(function, tracing_mode="fake")(torch.ones(4, 6), torch.ones(4, 6)).graph
    call = graph.find_nodes(op="output")[0].args[0]
    return call, graph.find_nodes(op="placeholder")[0]


WHOLE = {
    "two": lambda x, y: torch.cat((x[:, :2], x[:, 2:]), 1),
    "three": lambda x, y: torch.cat((x[:, :2], x[:, 2:3], x[:, 3:6]), -1),
    "rows": lambda x, y: torch.cat((x[:1], x[1:])),
}
PARTS = {
    "order": lambda x, y: torch.cat((x[:, 2:], x[:, :2]), 1),
    "a gap": lambda x, y: torch.cat((x[:, :2], x[:, 3:]), 1),
    "an overlap": lambda x, y: torch.cat((x[:, :3], x[:, 2:]), 1),
    "the end": lambda x, y: torch.cat((x[:, :2], x[:, 2:5]), 1),
    "another tensor": lambda x, y: torch.cat((x[:, :2], y[:, 2:]), 1),
    "another dimension": lambda x, y: torch.cat((x[:2], x[2:]), 1),
    "a step": lambda x, y: torch.cat((x[:, :3], x[:, 3:6:2]), 1),
    "a computed part": lambda x, y: torch.cat((x[:, :2], x[:, 2:] * 2), 1),
}


@pytest.mark.parametrize("name", WHOLE)
def test_neighbouring_slices_are_what_they_are_slices_of(name):
    call, source = last_call(WHOLE[name])
    assert uncut(call) is source


@pytest.mark.parametrize("name", PARTS)
def test_other_slices_are_joined(name):
    call, _ = last_call(PARTS[name])
    assert call.target is torch.ops.aten.cat.default
    assert uncut(call) is call
