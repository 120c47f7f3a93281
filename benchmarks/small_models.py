"""Small whole models, where the number of layers matters, and not what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, StaticCache

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
MLA = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def deepseek(layers: int, **sizes: int) -> Any:
    sizes = {**SIZES, **MLA, **sizes}
    config = DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=layers, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def llama(layers: int) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=layers, **SIZES)).eval()


@torch.no_grad()
def prefilled(model: Any, length: int, batch: int = 1) -> Any:
    """A StaticCache for this many tokens, with a prompt of four."""
    cache = StaticCache(config=model.config, max_cache_len=length)
    model(input_ids=tokens(4, batch), past_key_values=cache)
    return cache


def tokens(count: int = 1, batch: int = 1) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (batch, count))
