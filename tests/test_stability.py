"""Sizes of one, equal sizes, and a position that is known at run time only: what fuses stays the same."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import Recorder
from torch import nn
from zoo.entries import DEFAULT, Entry
from zoo.sizes import DECODE, FEW, SMALL, Step

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ALL = {"mla_prolog": 1, "latent_attention": 1}
ONE_PAIR = {"kv_rmsnorm_rope_cache": 1, "latent_attention": 1}
ALIKE = {"heads": 4, "nope": 4, "rope": 4, "value": 4, "q_rank": 4, "kv_rank": 4, "hidden": 4, "context": 4}
SIZES = {
    "one head": ({"heads": 1}, FEW, ALL),
    "as many heads as tokens": ({"heads": 3}, FEW, ALL),
    "as many heads as sequences": ({"heads": 2}, DECODE, ALL),
    "as many slots as columns": ({"nope": 32, "kv_rank": 32}, DECODE, ALL),
    "all alike": (ALIKE, Step("alike", 4, 0, 4), ALL),
    "one pair to rotate": ({"rope": 2}, DECODE, ONE_PAIR),
}


@pytest.fixture(autouse=True)
def no_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def check(module, arguments, fused):
    theirs, ours, recorder = copy.deepcopy(arguments), copy.deepcopy(arguments), Recorder()
    expected = module(*theirs)
    found = torch.compile(module, backend=recorder, fullgraph=True)(*ours)
    torch.testing.assert_close((found, ours), (expected, theirs), **CLOSE)
    assert recorder.fused == fused, str(recorder.report)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    sizes, step, fused = SIZES[name]
    entry = Entry(replace(DEFAULT, sizes=replace(SMALL, **sizes)))
    check(entry.build(), entry.arguments(step), fused)


class AtRunTime(nn.Module):
    """The position is read from a tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, tables, positions, mask, caches, place):
        start = place.item()
        torch._check(start >= 0)
        torch._check(start + x.shape[1] <= SMALL.context)
        return self.layer(x, tables, positions, mask, caches, start)


def test_position_known_at_run_time():
    entry = Entry(replace(DEFAULT, cache="slice_read_whole"))
    *arguments, start = entry.arguments(DECODE)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        check(AtRunTime(entry.build()), (*arguments, torch.tensor(start)), ALL)
