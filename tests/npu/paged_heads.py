"""Attention over keys and values per head in pages: sizes that the kernel takes, compilation, and a comparison."""

import copy

import torch
from lib.paged_heads import Sizes

import mla_fx
from npu import models

WIDTH, BF16 = 64, torch.bfloat16
KERNEL = "FusedInferAttentionScore"


def sized(tokens, block, **others):
    return Sizes(**{"tokens": tokens, "blocks": 3, "block": block, "width": WIDTH, "columns": WIDTH} | others)


def compared(run, module, given):
    """Results are as exact as eager's against float64; caches, which are rows as they were computed, are equal."""
    exact, eager = copy.deepcopy((module, given)), copy.deepcopy(given)
    in_double = [part.double() if part.is_floating_point() else part for part in exact[1]]
    with torch.no_grad():
        found, wanted, near = run(*given), exact[0].double()(*in_double), module(*eager)
    (error,), (allowed,) = models.errors([found], [wanted]), models.errors([near], [wanted])
    assert found.dtype == near.dtype and error <= 2 * allowed, (error, allowed)
    assert all(map(torch.equal, given[3:], eager[3:])), "a cache differs"


def compiled(module, dynamic=False, **options):
    torch._dynamo.reset()
    backend = mla_fx.get_backend(**{"target": "ge", "soc": "Ascend910B3"} | options)
    return torch.compile(module, backend=backend, dynamic=dynamic)
