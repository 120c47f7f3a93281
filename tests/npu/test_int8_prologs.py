"""Layers with int8 projections, as Ascend's recipes quantise them: MlaPrologV3 in its int8 modes.

R1 quantises all projections but kv_b, DeepSeek-V3.2 quantises q_b alone. Attention's keys stay in bfloat16."""

from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.ascend import mla_prolog_v3
from quantised import Stored, by_rows
from torch import nn
from torch.nn.functional import linear

import mla_fx
from npu import ge_graph, models
from npu.converted import types

pytestmark = pytest.mark.usefixtures("converted")
V32, R1 = ("q_b_proj",), ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")


class Int8(nn.Module):
    """A projection of int8: tokens are quantised as npu_dynamic_quant does, integers are multiplied."""

    def __init__(self, plain):
        super().__init__()
        for name, value in vars(by_rows(plain.weight.data.float())).items():
            self.register_buffer(name, value)

    def forward(self, x):
        w, wide = Stored(self.codes, self.scales), x.float()
        scales = wide.abs().amax(-1, keepdim=True) / 127
        codes = (wide / scales).round().clamp(-128, 127)
        return (linear(codes, w.codes.float()) * scales * w.scales).to(x.dtype)


def model_of(names, layers=1):
    model = models.model(layers=layers)
    for layer in model.layers:
        for name in names:
            setattr(layer.self_attn, name, Int8(getattr(layer.self_attn, name)))
    return model


def check(names, prompts=None, layers=1):
    model = model_of(names, layers)
    run = torch.compile(model, backend=mla_fx.get_backend(target="ge", strict=True), dynamic=False)
    prompts = prompts or [models.prompt(1, seed=seed) for seed in range(2)]
    models.check_as_exact_as_eager(model, run, models.static_cache, prompts)


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


# --- planted faults --------------------------------------------------------------------------------------------------


def rolled(name):
    """Each scale at the place of its neighbour."""
    dim = 0 if name == "dequant_scale_x" else 1

    def change(a):
        first, rest = getattr(a, name).split([1, getattr(a, name).shape[dim] - 1], dim)
        return {name: torch.cat((rest, first), dim)}

    return change


FAULTS = {
    "scales of the neighbouring column of q_b": (R1, rolled("dequant_scale_w_uq_qr")),
    "scales of the neighbouring column of q_a": (R1, rolled("dequant_scale_w_dq")),
    "scales of the neighbouring column of kv_a": (R1, rolled("dequant_scale_w_dkv_kr")),
    "codes and scales of different tokens": (R1, rolled("dequant_scale_x")),
    "scales of q_b lost": (V32, lambda a: {"dequant_scale_w_uq_qr": torch.ones_like(a.dequant_scale_w_uq_qr)}),
    "another epsilon for the query": (
        R1,
        lambda a: {"rmsnorm_epsilon_cq": 1.0, "rmsnorm_epsilon_ckv": a.rmsnorm_epsilon_cq},
    ),
    "smooth scales that no weight was divided by": (
        V32,
        lambda a: {"smooth_scales_cq": torch.linspace(0.5, 1.5, a.weight_dq.shape[1], device="cpu").unsqueeze(0)},
    ),
}


@pytest.mark.parametrize(("names", "fault"), FAULTS.values(), ids=FAULTS)
def test_planted_fault(monkeypatch, names, fault):
    whole = mla_prolog_v3.vendor_call
    monkeypatch.setattr(mla_prolog_v3, "vendor_call", lambda surface, a: whole(surface, replace(a, **fault(a))))
    with pytest.raises(AssertionError, match=r"^\(\["):
        check(names, [models.prompt(3)])
