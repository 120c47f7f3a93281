"""What no larger operator took: norms and rotations by themselves, of models at a prompt and at a step."""

import copy

import pytest
import torch

import mla_fx
from npu import models
from npu.converted import count
from npu.lowered import Call
from npu.models import compiled

KERNELS = ("RmsNorm", "InterleaveRope", "RotaryMul", "Rsqrt")


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize(("layout", "kernel"), [("interleave_half", "InterleaveRope"), ("half_half", "RotaryMul")])
def test_rope(converted, layout, kernel, tables):
    torch.manual_seed(0)
    args = [torch.randn(sizes).bfloat16() for sizes in [(2, 3, 4, 64), (tables, 3, 64), (tables, 3, 64)]]
    call = Call("rope", args, {"rope_layout": layout})
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=0, atol=0)
    assert count(converted.graphs[0], kernel) == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm(converted, dtype):
    torch.manual_seed(0)
    args = [torch.randn(2, 3, 96).to(dtype), (1 + 0.3 * torch.randn(96)).to(dtype)]
    call = Call("rms_norm", args, {"epsilon": 1e-3})
    torch.testing.assert_close(
        call.on_npu(converted), call.wanted(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6, atol=0
    )
    assert count(converted.graphs[0], "RmsNorm") == [1]


# A model's norms: two of each layer, the last one, and those of latents.
STEPS = {
    "decode": (models.static_cache, 1, "deepseek_v3", {}, [5, 0, 0, 0]),
    "prompt": (models.static_cache, 20, "deepseek_v3", {}, [7, 2, 0, 0]),
    "query of full rank": (models.static_cache, 1, "deepseek_v3", {"q_lora_rank": None}, [5, 2, 0, 0]),
    "growing cache": (models.grown, 1, "deepseek_v3", {"q_lora_rank": None}, [5, 2, 0, 0]),
    "halves": (models.static_cache, 20, "minicpm3", {}, [9, 0, 4, 0]),
    "rotation of complex numbers": (models.static_cache, 20, "deepseek_v2", {}, [9, 0, 0, 0]),
}


@pytest.mark.parametrize("step", STEPS)
def test_models(converted, step):
    make_cache, tokens, family, sizes, expected = STEPS[step]
    model = models.model(family, 2, **sizes)
    caches = {torch.bfloat16: make_cache(model)}
    double = copy.deepcopy(model).double()
    caches[torch.float64] = make_cache(double)
    run = compiled(model)
    models.check_as_exact_as_eager(
        model, run, lambda model: copy.deepcopy(caches[model.dtype]), [models.prompt(tokens)]
    )
    assert count(converted.graphs[-1], *KERNELS) == expected
    fused = mla_fx.last_report().pieces
    assert [fused.get("rms_norm", 0), fused.get("rope", 0)] == [expected[0], expected[1] + expected[2]]
    assert not [miss for miss in mla_fx.last_report().misses if miss.pattern in ("rms_norm", "rope")]


def test_nothing_is_taken_where_no_attention_fused(converted):
    """Norms alone stay what they are, to the last operator."""
    norm = torch.nn.RMSNorm(64).bfloat16()
    x = torch.randn(2, 4, 64).bfloat16()

    def step(x):
        return torch.nn.functional.scaled_dot_product_attention(norm(x), x, x)

    with torch.no_grad():
        torch.testing.assert_close(compiled(step)(x), step(x), rtol=2e-2, atol=2e-2)
    assert mla_fx.last_report().fused == {}
    assert count(converted.graphs[0], "RmsNorm", "Rsqrt") == [0, 1]
