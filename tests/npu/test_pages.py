"""Layers over pages that a block table names, written in plain PyTorch: the kernel is given the pages and the table."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.layers import in_type
from lib.zoo.caches import CACHES
from lib.zoo.entries import Entry
from lib.zoo.sizes import DECODE, Step

import mla_fx
from npu.converted import types
from npu.paged_layers import KERNELS, PAGED, REAL, WholePages


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("block, kernels", [(128, [1, 1]), (16, [1, 1]), (8, [0, 1])])
@torch.no_grad()
def test_a_paged_layer(converted, block, kernels, dynamic):
    entry = Entry(replace(PAGED, sizes=replace(REAL, block=block)))
    module, given = entry.build().bfloat16(), in_type(entry.arguments(DECODE), torch.bfloat16)
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(given)
    backend = mla_fx.get_backend(target="ge", soc="Ascend910B3", causal_masks=True)
    (found,) = torch.compile(module, backend=backend, dynamic=dynamic)(*given)
    report = mla_fx.last_report()
    (wanted,) = exact(*in_type(eager, torch.float64))
    (near,) = module(*eager)
    assert (found - wanted).norm() <= 2 * (near - wanted).norm(), str(report)
    torch.testing.assert_close(given[4], eager[4], rtol=2**-6, atol=2**-6)
    graph = types(converted.graphs[-1])
    assert [graph.count(kernel) for kernel in KERNELS] == kernels, str(report)
    assert ("IndexByTensor" in graph) == (block == 8), graph
    if kernels[0]:
        assert "TensorMove" not in graph, "a cache is copied"


@torch.no_grad()
def test_whole_pages(converted, monkeypatch):
    """A page of 16 tokens for each sequence: slots for the kernel, and no copy of the cache."""
    monkeypatch.setitem(CACHES, "paged", WholePages())
    entry = Entry(replace(PAGED, sizes=replace(REAL, block=16)))
    module, given = entry.build().bfloat16(), in_type(entry.arguments(Step("page", 16, 32)), torch.bfloat16)
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(given)
    backend = mla_fx.get_backend(target="ge", soc="Ascend910B3", causal_masks=True, absorb="always")
    (found,) = torch.compile(module, backend=backend)(*given)
    (wanted,), (near,) = exact(*in_type(copy.deepcopy(eager), torch.float64)), module(*eager)
    assert (found - wanted).norm() <= 2 * (near - wanted).norm()
    torch.testing.assert_close(given[4], eager[4], rtol=2**-6, atol=2**-6)
    graph = types(converted.graphs[-1])
    assert [graph.count(kernel) for kernel in (*KERNELS, "TensorMove", "ScatterNdUpdate")] == [1, 1, 0, 0]


@torch.no_grad()
def test_a_paged_layer_is_captured(captured):
    """Each sequence has a length of its own, which the mask gives."""
    entry = Entry(PAGED)
    module, given = entry.build().bfloat16(), in_type(entry.arguments(DECODE), torch.bfloat16)
    eager, exact = copy.deepcopy(given), copy.deepcopy(module).double()
    backend = mla_fx.get_backend(target="aclgraph", soc="Ascend910B3", causal_masks=True)
    (found,) = torch.compile(module, backend=backend)(*given)
    (near,), (wanted,) = module(*eager), exact(*in_type(copy.deepcopy(given), torch.float64))
    assert (found - wanted).norm() <= 2 * (near - wanted).norm()
    torch.testing.assert_close(given[4], eager[4], rtol=2**-6, atol=2**-6)
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out") == [1, 1]
    assert "2 lengths read by the host before each call" in mla_fx.last_report().notes
