"""Both kinds of graph in one process, which imported torchair before torch_npu."""

import pytest
import torch
import torchair  # noqa: F401  it registers operators that write in place, and finds none before torch_npu is there

import mla_fx
from npu import models
from npu.converted import types
from npu.copies import KEY_SIDE, PROLOG, check_nothing_is_copied


@pytest.mark.parametrize("order", [("ge", "aclgraph"), ("aclgraph", "ge")], ids="-".join)
def test_caches_are_written_in_place(converted, captured, order):
    for target in order:
        torch.compiler.reset()
        model = models.model()
        run = torch.compile(model, backend=mla_fx.get_backend(target=target, soc="Ascend910B3"), dynamic=False)
        models.check_as_exact_as_eager(model, run, models.static_cache, [models.prompt(20), models.prompt(1)])
    kernels = "KvRmsNormRopeCache", "MlaPrologV3", "TensorMove"
    assert [[types(graph).count(name) for name in kernels] for graph in converted.graphs] == [[1, 0, 0], [0, 1, 0]]
    assert [graph.calls(KEY_SIDE, PROLOG) for graph in captured.graphs] == [[1, 0], [0, 1]]
    for graph in captured.graphs:
        check_nothing_is_copied(graph)
