"""Layers whose pages are in FRACTAL_NZ, written in plain PyTorch: the kernels are given the pages as they are."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.layers import in_type
from lib.zoo.caches import CACHES
from lib.zoo.entries import Entry
from lib.zoo.sizes import DECODE, FEW, Step

import mla_fx
from npu.converted import types
from npu.paged_layers import KERNELS, PAGED, REAL, NzWholePages

BF16 = torch.bfloat16
NAMES = [name for name in CACHES if name.startswith("nz")]
COPIES = {"TensorMove", "Transpose", "ScatterNdUpdate", "IndexByTensor", "ScatterElementsV2", "GatherElements"}
ATTENTION = "FusedInferAttentionScore"


def in_double(given):
    """The same rows in float64, where 32 bytes hold fewer columns."""
    x, tables, positions, mask, caches, place = in_type(copy.deepcopy(given), torch.float64)
    for cache in caches:
        blocks, size, width = cache.shape
        rows = cache.view(blocks, width // 16, size, 16).transpose(1, 2).flatten(2)
        cache.copy_(rows.unflatten(2, (-1, 4)).transpose(1, 2).reshape(cache.shape))
    return x, tables, positions, mask, caches, place


def entry_of(cache, **sizes):
    return Entry(replace(PAGED, cache=cache, sizes=replace(REAL, **sizes)))


def run(entry, step, **options):
    """Run and compare with float64, and the caches with those of eager mode."""
    module, given = entry.build().bfloat16(), in_type(entry.arguments(step), BF16)
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(given)
    backend = mla_fx.get_backend(soc="Ascend910B3", causal_masks=True, **options)
    (found,) = torch.compile(module, backend=backend)(*given)
    report = mla_fx.last_report()
    (wanted,), (near,) = exact(*in_double(eager)), module(*eager)
    assert (found - wanted).norm() <= 2 * (near - wanted).norm(), str(report)
    torch.testing.assert_close(given[4], eager[4], rtol=2**-6, atol=2**-6)
    return report


def check_graph(converted, report, kernels=KERNELS):
    """One of each kernel, and no cache is copied or moved."""
    graph = types(converted.graphs[-1])
    assert [graph.count(kernel) for kernel in kernels] == [1] * len(kernels), str(report)
    assert not COPIES & {*graph[: graph.index(ATTENTION)]}, graph


@pytest.mark.parametrize("step", [DECODE, FEW], ids=lambda step: step.name)
@pytest.mark.parametrize("cache", NAMES)
@torch.no_grad()
def test_a_layer(converted, cache, step):
    check_graph(converted, run(entry_of(cache), step, target="ge"))


@torch.no_grad()
def test_the_key_side_alone(converted):
    entry = Entry(replace(PAGED, cache="nz", query="direct"))
    report = run(entry, DECODE, target="ge")
    graph = types(converted.graphs[-1])
    assert [graph.count(kernel) for kernel in ("KvRmsNormRopeCache", ATTENTION)] == [1, 1], str(report)
    assert "TensorMove" not in graph


@torch.no_grad()
def test_whole_pages(converted, monkeypatch):
    monkeypatch.setitem(CACHES, "nz", NzWholePages())
    report = run(entry_of("nz", block=16), Step("page", 16, 32), target="ge", absorb="always")
    check_graph(converted, report)


@torch.no_grad()
def test_a_layer_is_captured(captured):
    report = run(entry_of("nz"), DECODE, target="aclgraph")
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out") == [1, 1]
    assert "2 lengths read by the host before each call" in report.notes


@torch.no_grad()
def test_pages_that_no_kernel_can_cut(converted):
    """Plain pages of 16 tokens are taken by every release, and those in FRACTAL_NZ are passed as they are."""
    report = mla_fx.explain(entry_of("nz", block=16).build().bfloat16(), target="ge", soc="Ascend910B3",
                            causal_masks=True, cann="8.5.0.alpha001")  # fmt: skip
    reasons = str(report(*in_type(entry_of("nz", block=16).arguments(DECODE), BF16)))
    assert "kv_cache in FRACTAL_NZ has BlockSize = 16" in reasons, reasons
