"""Layers over pages that a block table names, plain ones and in FRACTAL_NZ, written in plain PyTorch: the kernels are
given the pages as they are, and the table."""

import copy
from dataclasses import replace

import pytest
import torch
from lib.layers import in_type
from lib.zoo.caches import CACHES
from lib.zoo.entries import Entry
from lib.zoo.sizes import DECODE, FEW, Step

import mla_fx
from npu.converted import count, types
from npu.paged_layers import KERNELS, PAGED, REAL, NzWholePages, WholePages

pytestmark = pytest.mark.usefixtures("no_gradients")
BF16, ATTENTION = torch.bfloat16, "FusedInferAttentionScore"
COPIES = {"TensorMove", "Transpose", "ScatterNdUpdate", "IndexByTensor", "ScatterElementsV2", "GatherElements"}


def in_double(given, is_nz):
    """Widen a layer's inputs to float64. In FRACTAL_NZ, 32 bytes then hold fewer columns."""
    x, tables, positions, mask, caches, place = in_type(copy.deepcopy(given), torch.float64)
    for cache in caches if is_nz else ():
        blocks, size, width = cache.shape
        rows = cache.view(blocks, width // 16, size, 16).transpose(1, 2).flatten(2)
        cache.copy_(rows.unflatten(2, (-1, 4)).transpose(1, 2).reshape(cache.shape))
    return x, tables, positions, mask, caches, place


def entry_of(cache, query=PAGED.query, **sizes):
    return Entry(replace(PAGED, cache=cache, query=query, sizes=replace(REAL, **sizes)))


def run(entry, step, *, dynamic=None, **options):
    """Run and compare with float64, and the caches with those of eager mode."""
    module, given = entry.build().bfloat16(), in_type(entry.arguments(step), BF16)
    exact, eager = copy.deepcopy(module).double(), copy.deepcopy(given)
    backend = mla_fx.get_backend(soc="Ascend910B3", causal_masks=True, **options)
    (found,) = torch.compile(module, backend=backend, dynamic=dynamic)(*given)
    report = mla_fx.last_report()
    (wanted,), (near,) = exact(*in_double(eager, entry.spelling.cache.startswith("nz"))), module(*eager)
    assert (found - wanted).norm() <= 2 * (near - wanted).norm(), str(report)
    torch.testing.assert_close(given[4], eager[4], rtol=2**-6, atol=2**-6)
    return report


# Pages of 128 tokens are as those of 16 where sizes are symbols.
@pytest.mark.parametrize("block, dynamic", [(128, False), (16, False), (16, True), (8, False), (8, True)])
def test_plain_pages(converted, block, dynamic):
    """Too small ones no prolog writes, and attention's context is gathered."""
    report = run(entry_of("paged", block=block), DECODE, target="ge", dynamic=dynamic)
    graph, is_small = types(converted.graphs[-1]), block == 8
    assert [graph.count(kernel) for kernel in KERNELS] == [int(not is_small), 1], str(report)
    assert ("IndexByTensor" in graph) == is_small, graph
    assert is_small or "TensorMove" not in graph, "a cache is copied"


def check_graph(converted, report):
    """One of each kernel, and no cache is copied or moved."""
    assert count(converted.graphs[-1], *KERNELS) == [1, 1], str(report)
    graph = types(converted.graphs[-1])
    assert not COPIES & {*graph[: graph.index(ATTENTION)]}, graph


# How rows are written and how many there are, are two things.
@pytest.mark.parametrize("cache, step", [("nz", DECODE), ("nz", FEW), ("nz_transposed", FEW), ("nz_one_head", DECODE)])
def test_pages_in_nz(converted, cache, step):
    check_graph(converted, run(entry_of(cache), step, target="ge"))


def test_the_key_side_alone(converted):
    report = run(entry_of("nz", "direct"), DECODE, target="ge")
    assert count(converted.graphs[-1], "KvRmsNormRopeCache", ATTENTION, "TensorMove") == [1, 1, 0], str(report)


@pytest.mark.parametrize("cache, spelling", [("paged", WholePages()), ("nz", NzWholePages())])
def test_whole_pages(converted, monkeypatch, cache, spelling):
    """A page of 16 tokens for each sequence: slots for the kernel, and no copy of the cache."""
    monkeypatch.setitem(CACHES, cache, spelling)
    report = run(entry_of(cache, block=16), Step("page", 16, 32), target="ge", absorb="always")
    check_graph(converted, report)


@pytest.mark.parametrize("cache", ["paged", "nz"])
def test_a_layer_is_captured(captured, cache):
    """Each sequence has a length of its own, which the mask gives."""
    report = run(entry_of(cache), DECODE, target="aclgraph")
    (graph,) = captured.graphs
    assert graph.calls("npu.npu_mla_prolog_v3.default", "npu.npu_fused_infer_attention_score_v2.out") == [1, 1]
    assert "2 lengths read by the host before each call" in report.notes


def test_pages_that_no_kernel_can_cut():
    """Plain pages of 16 tokens are taken by every release, and those in FRACTAL_NZ are passed as they are."""
    entry = entry_of("nz", block=16)
    explain = mla_fx.explain(entry.build().bfloat16(), target="ge", soc="Ascend910B3", causal_masks=True,
                             cann="8.5.0.alpha001")  # fmt: skip
    reasons = str(explain(*in_type(entry.arguments(DECODE), BF16)))
    assert "kv_cache in FRACTAL_NZ has BlockSize = 16" in reasons, reasons
