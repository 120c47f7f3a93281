"""Layers with int8 projections, as Ascend's recipes quantise them: MlaPrologV3 in its int8 modes.

R1 quantises all projections but kv_b, DeepSeek-V3.2 quantises q_b alone. With an int8 kv_b, latents are quantised when
they are read, and the scales of keys are in weight_uk. Attention's keys stay in bfloat16."""

import pytest
import torch
from lib import plants
from mla_fx.lowering.ascend.operators import mla_prolog_v3
from mla_fx.patterns import mla_attention

import mla_fx
from mla_fx.rule.operands import Call
from npu import ge_graph, models, planted
from npu.converted import types
from npu.int8_models import KEYS, R1, V32, model_of

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("converted")
SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")


def check(names, prompts=None, layers=1):
    model = model_of(names, layers)
    check_run(model, compiled(model), prompts)


def check_run(model, run, prompts=None):
    prompts = prompts or [models.prompt(1, seed=seed) for seed in range(2)]
    models.check_as_exact_as_eager(model, run, models.static_cache, prompts)


def compiled(model):
    return torch.compile(model, backend=mla_fx.get_backend(target="ge", strict=True), dynamic=False)


def prologs(converted):
    return [op for graph in converted.graphs for op in graph.op if op.type == "MlaPrologV3"]


@pytest.mark.parametrize(("names", "mode", "given"), [(V32, 1, SCALES[2:3]), (R1, 2, SCALES)], ids=["V3.2", "R1"])
def test_weight_modes(converted, names, mode, given):
    check(names, layers=2)
    found = prologs(converted)
    assert len(found) == 2 and "FusedInferAttentionScore" in types(converted.graphs[0])
    for op in found:
        attributes = ge_graph.attributes(op)
        assert (attributes["weight_quant_mode"], attributes["kv_cache_quant_mode"]) == (mode, 0)
        assert {name for name, _ in ge_graph.inputs(op)} & set(SCALES) == set(given)


@pytest.mark.parametrize("names", [V32, R1], ids=["V3.2", "R1"])
def test_three_tokens(converted, names):
    check(names, [models.prompt(3)])
    assert len(prologs(converted)) == 1


@pytest.mark.parametrize(("names", "mode"), [(V32, 1), (R1, 2)], ids=["V3.2", "R1"])
def test_int8_keys(converted, names, mode):
    """weight_uk is an input of the step: codes times scales, computed again when either is written."""
    model = model_of(names + KEYS)
    run, projection = compiled(model), model.layers[0].self_attn.kv_b_proj
    check_run(model, run)
    (op,), (graph,) = prologs(converted), converted.graphs
    assert ge_graph.attributes(op)["weight_quant_mode"] == mode and "FusedInferAttentionScore" in types(graph)
    source = dict(ge_graph.inputs(op))["weight_uk"].partition(":")[0]
    assert {one.name: one.type for one in graph.op}[source] == "Data"
    given = [one.output_desc[0] for one in graph.op if one.type == "Data"]
    codes = [ge_graph.shape(one) for one in given if ge_graph.dtype(one) == torch.int8]
    assert codes and list(projection.codes.shape) not in codes
    for part in (projection.codes, projection.scales):
        part.copy_(part.flip(0))
        check_run(model, run)
    assert len(converted.graphs) == 1


# --- planted faults --------------------------------------------------------------------------------------------------


def test_planted_fault(monkeypatch):
    """Each scale of q_b is at the place of its neighbour. test_planted_faults.py has the others."""
    planted.arguments(
        mla_prolog_v3, lambda a: {"dequant_scale_w_uq_qr": planted.moved(a.dequant_scale_w_uq_qr, 1)}
    )(monkeypatch)
    with pytest.raises(AssertionError, match=r"^\(\["):
        check(R1, [models.prompt(3)])


def without_scales(multiply, scales, codes, dims):
    return codes


def with_scales_of_the_neighbouring_column(multiply, scales, codes, dims):
    moved = Call(aten.roll.default, codes, [-1], [1])
    return Call(aten.roll.default, multiply(scales, moved, dims), [1], [1])


@pytest.mark.parametrize(
    ("names", "fault"), [(V32, without_scales), (R1, with_scales_of_the_neighbouring_column)], ids=["V3.2", "R1"]
)
def test_planted_fault_in_keys(monkeypatch, names, fault):
    multiply = mla_attention.scaled_by

    def scaled_by(scales, value, dims):
        is_weight = len(dims) == 3
        return fault(multiply, scales, value, dims) if is_weight else multiply(scales, value, dims)

    monkeypatch.setattr(mla_attention, "scaled_by", scaled_by)
    plants.unproved(monkeypatch)
    with pytest.raises(AssertionError, match=r"^\(\["):
        check(names + KEYS, [models.prompt(3)])
