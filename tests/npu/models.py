"""Models of Hugging Face at sizes that the vendor's kernels take, run step by step on a cache and compared."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache, MiniCPM3Config, StaticCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model
from transformers.models.minicpm3.modeling_minicpm3 import MiniCPM3Model

import mla_fx

CONTEXT = 256
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 64}
# DeepSeek-V3's own sizes, but for the vocabulary and the feed-forward part, which nothing here is about.
REAL = {"hidden_size": 7168, "num_attention_heads": 128}
EPSILONS = {"q_a_layernorm": 0.1, "kv_a_layernorm": 0.3}
SMALL = {"hidden_size": 1024, "num_attention_heads": 4}


FAMILIES = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2Model),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3Model),
    "minicpm3": (MiniCPM3Config, MiniCPM3Model),
}


def model(family: str = "deepseek_v3", layers: int = 1, **sizes: Any) -> nn.Module:
    """In bfloat16, with dense random weights: linear ones of 1/sqrt(fan_in), those of norms around one."""
    sizes = {**SMALL, **LATENT, **sizes}
    configuration, kind = FAMILIES[family]
    config = configuration(
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        intermediate_size=256,
        vocab_size=64,
        max_position_embeddings=CONTEXT,
        num_key_value_heads=sizes["num_attention_heads"],
        head_dim=sizes["qk_rope_head_dim"],
        pad_token_id=0,
        **sizes,
    )
    config._attn_implementation = "sdpa"
    return with_epsilons(dense(kind(config).eval())).to(torch.bfloat16)


def dense(model: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=draw)
            weight.copy_(1 + 0.3 * noise if weight.ndim == 1 else noise * weight.shape[-1] ** -0.5)
    return model


def with_epsilons(model: nn.Module) -> nn.Module:
    """Gives norms of latents epsilons that are unlike each other, and so large that they show."""
    for name, module in model.named_modules():
        if name.endswith(tuple(EPSILONS)):
            module.variance_epsilon = EPSILONS[name.rpartition(".")[2]]
    return model


def static_cache(model: nn.Module, context: int = CONTEXT, batch: int = 1) -> StaticCache:
    """A cache that exists: it would be made in the graph of the first step otherwise."""
    cache = StaticCache(config=model.config, max_cache_len=context)
    with torch.no_grad():
        model(prompt(1, batch), past_key_values=cache)
    cache.reset()
    return cache


def dynamic_cache(model: nn.Module) -> DynamicCache:
    return DynamicCache(config=model.config)


def grown(model: nn.Module) -> DynamicCache:
    """A cache that grows, after a prompt."""
    cache = dynamic_cache(model)
    steps(model, cache, [prompt(32)])
    return cache


def prompt(count: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (batch, count), generator=torch.Generator().manual_seed(seed))


def steps(model: Any, cache: Any, prompts: list[Tensor]) -> list[Tensor]:
    """The hidden states of each step, and then the caches."""
    with torch.no_grad():
        states = [model(ids, past_key_values=cache).last_hidden_state.clone() for ids in prompts]
    return states + rows_of(cache)


def rows_of(cache: Any) -> list[Tensor]:
    return [rows.clone() for layer in cache.layers for rows in (layer.keys, layer.values)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest distance from the exact values, as a part of their largest one."""
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs]


def check_as_exact_as_eager(
    model: nn.Module, compiled: Any, make_cache: Any, prompts: list[Tensor], called: Any = lambda step: step
) -> None:
    """Outputs and caches are no further from a float64 run than twice what eager's are. `called` is put around each."""
    double = copy.deepcopy(model).double()
    exact = steps(called(double), make_cache(double), prompts)
    eager = steps(called(model), make_cache(model), prompts)
    found = steps(called(compiled), make_cache(model), prompts)
    allowed = [2 * error + 1e-6 for error in errors(eager, exact)]
    assert all(error <= limit for error, limit in zip(errors(found, exact), allowed, strict=True)), (
        errors(found, exact),
        allowed,
    )


def compiled(model: nn.Module, *, dynamic: bool | None = False, **options: Any) -> Any:
    return torch.compile(model, backend=mla_fx.get_backend(target="ge", **options), dynamic=dynamic)


class Layer(nn.Module):
    """Hugging Face's attention with the causal mask that its model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = model().layers[0].self_attn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Tensor, cache: StaticCache) -> Tensor:
        position = past + torch.arange(x.shape[1])
        mask = torch.arange(CONTEXT) <= position[:, None]
        return self.attention(x, (cos, sin), mask[None, None], past_key_values=cache)[0]
