"""A model with biased projections, for `python -m mla_fx explain examples/biased.py`: the prolog does not fuse."""

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A small DeepSeek-V3 with four tokens in its cache, and the next token."""
    config = DeepseekV3Config(
        vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=2, first_k_dense_replace=2,
        num_attention_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        attention_bias=True,
    )  # fmt: skip
    model: nn.Module = DeepseekV3ForCausalLM(config)
    model.requires_grad_(False).eval()
    cache = StaticCache(config=config, max_cache_len=16)
    with torch.no_grad():
        model(torch.tensor([[3, 1, 4, 1]]), past_key_values=cache)
    return model, (), {"input_ids": torch.tensor([[5]]), "past_key_values": cache}
