"""Layers that a vendor's kernel does not support: the report says why, the next smaller fusion is used, and results and
caches are as exact as eager's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import mla_fx
from npu import models
from npu.converted import types

KERNELS = ("MlaPrologV3", "KvRmsNormRopeCache", "FusedInferAttentionScore")
ATTENTION, KEY_SIDE_AND_ATTENTION, KEY_SIDE, NONE = [0, 0, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]
POWERS = "1, 2, 4, 8, 16, 32, 64 or 128"
A2_A3 = "Ascend910B or Ascend910_93"
A2_A3_950 = "Ascend910B, Ascend910_93 or Ascend950"


@dataclass(frozen=True)
class Case:
    """`reasons` is all that the report says, but for what is computed once; `kernels` how often each is there."""

    kernels: list[int]
    reasons: list[str]
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    chip: str = "Ascend910B3"
    context: int = 64
    tokens: int = 1


def to_target(*reasons):
    return [f"target 'ge': {reason}" for reason in reasons]


CASES = {
    "heads": Case(
        KEY_SIDE,
        [
            *to_target(f"weight_uk has N = 6; MlaPrologV3 takes {POWERS}"),
            f"latent_attention becomes its body: query has N = 6; FusedInferAttentionScore takes {POWERS}",
        ],
        {"num_attention_heads": 6},
    ),
    "hidden size": Case(
        KEY_SIDE_AND_ATTENTION,
        to_target(
            "weight_dq has He = 960; MlaPrologV3 of CANN 8.5.0 takes 1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 "
            "or 8192"
        ),
        {"hidden_size": 960},
    ),
    "rank of the query": Case(
        KEY_SIDE_AND_ATTENTION,
        to_target("weight_dq has Hcq = 1024; MlaPrologV3 of CANN 8.5.0 takes 1536"),
        {"q_lora_rank": 1024},
    ),
    "query of full rank": Case(
        KEY_SIDE_AND_ATTENTION,
        to_target("weight_dq is None; MlaPrologV3 computes the query from a compressed one"),
        {"q_lora_rank": None},
    ),
    "rank of the keys": Case(
        NONE,
        [
            *to_target(
                "weight_uk has Hckv = 256; MlaPrologV3 takes 512",
                "gamma has Hckv = 256; KvRmsNormRopeCache takes 512",
            ),
            "latent_attention becomes its body: query has Hckv = 256; FusedInferAttentionScore takes 512",
        ],
        {"kv_lora_rank": 256},
    ),
    "rotary size": Case(
        NONE,
        [
            *to_target(
                "weight_dkv_kr has Dr = 32; MlaPrologV3 takes 64",
                "kv has Dr = 32; KvRmsNormRopeCache takes 64",
            ),
            "latent_attention becomes its body: query_rope has Dr = 32; FusedInferAttentionScore takes 64",
        ],
        {"qk_rope_head_dim": 32},
    ),
    "projections with a bias": Case(
        KEY_SIDE_AND_ATTENTION,
        ["the projection has a bias, which the fused operators do not support"],
        {"attention_bias": True},
    ),
    "rotation of complex numbers": Case(
        ATTENTION,
        to_target(
            "rope_layout is 'interleave_interleave'; MlaPrologV3 writes halves, which reorders kr_cache",
            "rope_layout is 'interleave_interleave'; KvRmsNormRopeCache reads interleaved columns and writes halves, "
            "'interleave_half'",
        ),
        {"family": "deepseek_v2"},
    ),
    "float32": Case(
        NONE,
        [
            *to_target(
                "weight_uk has dtype torch.float32; MlaPrologV3 takes torch.bfloat16",
                "kv has dtype torch.float32; KvRmsNormRopeCache takes torch.bfloat16 or torch.float16",
            ),
            "latent_attention becomes its body: query has dtype torch.float32; FusedInferAttentionScore takes "
            "torch.bfloat16 or torch.float16",
        ],
        dtype=torch.float32,
    ),
    "float16": Case(
        KEY_SIDE_AND_ATTENTION,
        to_target("weight_uk has dtype torch.float16; MlaPrologV3 takes torch.bfloat16"),
        dtype=torch.float16,
    ),
    "chip": Case(
        NONE,
        [
            *to_target(
                f"the chip is Ascend310P3; MlaPrologV3 of CANN 8.5.0 exists on {A2_A3}",
                f"the chip is Ascend310P3; KvRmsNormRopeCache exists on {A2_A3_950}",
            ),
            f"latent_attention becomes its body: the chip is Ascend310P3; FusedInferAttentionScore exists on {A2_A3}",
        ],
        chip="Ascend310P3",
    ),
    "positions": Case(
        KEY_SIDE_AND_ATTENTION,
        to_target(
            "kv_cache has T = 50; MlaPrologV3 writes pages, so T must be a multiple of 16: make the cache 64 tokens "
            "long"
        ),
        context=50,
    ),
    "width of values, in a prompt": Case(
        KEY_SIDE,
        ["mla_attention becomes its body: weight_uv has Dv = 64; FusedInferAttentionScore takes 128"],
        {"v_head_dim": 64},
        tokens=20,
    ),
}


def check(converted, model, case):
    run = torch.compile(model, backend=mla_fx.get_backend(target="ge", soc=case.chip), dynamic=False)
    make_cache = functools.partial(models.static_cache, context=case.context)
    models.check_as_exact_as_eager(model, run, make_cache, [models.prompt(case.tokens)])
    report = mla_fx.last_report()
    usual = "laid out once", "read by the host"
    notes = [note for note in report.notes if not any(part in note for part in usual)]
    told = [miss.reason for miss in report.misses if miss.pattern != "absorb"] + notes
    assert told == case.reasons
    (graph,) = converted.graphs
    assert [types(graph).count(kernel) for kernel in KERNELS] == case.kernels


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_what_comes_instead(converted, case):
    check(converted, models.model(**case.sizes).to(case.dtype), case)


class Padded(nn.Module):
    """A model whose tokens all see the same part of the cache."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config
        self.register_buffer("visible", (torch.arange(64) % 3 != 1).view(1, 1, 1, -1))

    def forward(self, ids, past_key_values):
        return self.model(ids, past_key_values=past_key_values, attention_mask=self.visible)


def test_a_mask_that_is_not_causal(converted):
    reason = (
        "latent_attention becomes its body: mask is a tensor; FusedInferAttentionScore takes the length of each "
        "sequence, and the mask is not provably causal; set causal_masks=True if it is"
    )
    check(converted, Padded(models.model()), Case([1, 0, 0], [reason], tokens=3))


class Shifted(nn.Module):
    """A norm with a bias."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(0.3 * torch.linspace(-1, 1, norm.weight.numel(), dtype=norm.weight.dtype))

    def forward(self, x):
        return self.norm(x) + self.bias


NORMS = {
    "no norm of the query": (
        "q_a_layernorm",
        lambda norm: nn.Identity(),
        KEY_SIDE_AND_ATTENTION,
        ["expected an RMSNorm, found mm"],
    ),
    "no norm of the keys": (
        "kv_a_layernorm",
        lambda norm: nn.Identity(),
        ATTENTION,
        ["expected an RMSNorm, found mm"] * 2,  # of the prolog, and of the key side alone
    ),
    "a norm of the keys with a bias": ("kv_a_layernorm", Shifted, ATTENTION, ["expected an RMSNorm, found add"] * 2),
}


@pytest.mark.parametrize(
    "norm, other, kernels, reasons", [pytest.param(*case, id=name) for name, case in NORMS.items()]
)
def test_other_norms(converted, norm, other, kernels, reasons):
    model = models.model()
    attention = model.layers[0].self_attn
    setattr(attention, norm, other(getattr(attention, norm)))
    check(converted, model, Case(kernels, reasons))
