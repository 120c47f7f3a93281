"""Plain code with int8 caches and given scales: KvRmsNormRopeCache with the scales, and attention over what is read."""

import copy

import pytest
import torch
from lib.coded_pages import OneScale, RoundedFirst
from mla_fx.lowering.ascend.operators import kv_rmsnorm_rope_cache as lowering
from torch.utils._pytree import tree_map_only

import mla_fx
from npu import ge_graph, planted
from npu.coded_pages import Contiguous, Pages, inputs
from npu.converted import types

KEY_SIDE, OPERATOR, ATTENTION = "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", "FusedInferAttentionScore"
ON_REQUEST = "values are rounded to torch.bfloat16 before they are quantised, in a kernel they are not"

pytestmark = [pytest.mark.usefixtures("converted"), pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")]


class PagesOfOneScale(Pages, OneScale):
    """And rotary keys in bfloat16."""


class RoundedPages(Pages, RoundedFirst):
    """Values are rounded before they are quantised."""


def check(layer, *, dynamic=False, **options):
    """Outputs are at most twice as far from a float64 run as eager's. Codes are eager's, unless the vendor's are asked
    for; rows of other caches are close."""
    ours, theirs, exact = inputs(layer), inputs(layer), tree_map_only(torch.Tensor, wide, inputs(layer))
    with torch.no_grad():
        eager, truth = layer(*theirs), copy.deepcopy(layer).double()(*exact)
        backend = mla_fx.get_backend(target="ge", soc="Ascend910B3", causal_masks=True, **options)
        found = torch.compile(layer, backend=backend, dynamic=dynamic)(*ours)
    errors = [float((part.double() - truth).norm() / truth.norm()) for part in (found, eager)]
    for mine, other in zip(ours[-1], theirs[-1], strict=True):
        distance = (mine.double() - other.double()).abs().max()
        allowed = 2**-6 * other.abs().max() if other.is_floating_point() else "quant" in options
        assert distance <= allowed, [float(distance)]
    assert errors[0] <= 2 * errors[1], errors
    return mla_fx.last_report()


def wide(x):
    return x.double() if x.is_floating_point() else x


def key_sides(converted):
    return [op for graph in converted.graphs for op in graph.op if op.type == KEY_SIDE]


SCALES = {"k_rope_scale", "c_kv_scale"}


@pytest.mark.parametrize(
    ("build", "given_scales", "options"),
    [
        (Pages, SCALES, {}),
        (lambda: Pages(block=16), SCALES, {}),
        (PagesOfOneScale, {"c_kv_scale"}, {}),
        (lambda: Pages(block=128), SCALES, {}),
        (Contiguous, SCALES, {}),
        (lambda: Contiguous(160), SCALES, {}),
        (RoundedPages, SCALES, {"quant": "vendor"}),
    ],
    ids=["pages", "small pages", "large pages", "one scale", "contiguous", "contiguous, small pages", "rounded"],
)
def test_the_key_side_takes_the_scales(converted, build, given_scales, options):
    report = check(build(), **options)
    (op,) = key_sides(converted)
    fed = {name for name, _ in ge_graph.inputs(op)}
    attributes = ge_graph.attributes(op)
    assert fed & SCALES == given_scales and attributes["cache_mode"] == "PA", str(report)
    assert attributes["epsilon"] == pytest.approx(1e-6)
    assert types(converted.graphs[0]).count(ATTENTION) == 1, str(report)
    wanted = [f"{OPERATOR}: {ON_REQUEST}"] if options else []
    assert [note for note in report.notes if OPERATOR in note] == wanted


@pytest.mark.parametrize("build", [Pages, Contiguous])
def test_any_number_of_tokens(converted, build):
    report = check(build(), dynamic=True)
    (op,) = key_sides(converted)
    assert ge_graph.attributes(op)["cache_mode"] == "PA", str(report)


@pytest.mark.parametrize(
    ("build", "because"),
    [
        (RoundedPages, f"{ON_REQUEST}; quant='vendor' takes the operator's codes"),
        (
            lambda: Contiguous(48, block=16),
            "target 'ge': ckv_cache has T = 48; KvRmsNormRopeCache writes int8 in pages, so T must be a multiple of "
            "32: make the cache 64 tokens long",
        ),
    ],
    ids=["rounded", "T"],
)
def test_the_program_writes_what_the_kernel_would_not(converted, build, because):
    report = check(build())
    assert not key_sides(converted)
    assert [miss.reason for miss in report.misses if miss.pattern == OPERATOR] == [because]


def test_planted_fault(monkeypatch):
    """Scales of another column. test_planted_faults.py has the others."""
    planted.arguments(lowering, lambda a: {"c_kv_scale": planted.moved(a.c_kv_scale, 1)})(monkeypatch)
    with pytest.raises(AssertionError, match=r"^\[\d"):
        check(Pages())
