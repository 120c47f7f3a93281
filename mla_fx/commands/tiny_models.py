"""Small configurations of every model type in transformers that has Multi-head Latent Attention."""

from __future__ import annotations

from typing import Any

TINY = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "head_dim": 8,
    "first_k_dense_replace": 8,
    "layer_group_size": 2,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes under every name that transformers uses; a model type takes those that it has."""
TINY_IF_USED = {"q_lora_rank": 48, "qk_rope_head_dim": 8}
"""Optional sizes, left out if a model type does not need them."""
MOST_LAYERS = 8


def mla_families() -> list[str]:
    """The model types in transformers whose configuration has a `kv_lora_rank`."""
    from transformers import CONFIG_MAPPING

    return sorted(name for name in CONFIG_MAPPING if hasattr(CONFIG_MAPPING[name], "kv_lora_rank"))


def tiny_config(config_class: Any) -> Any:
    """A small configuration with two layers, or as many as a hybrid needs to have one with softmax attention."""
    sizes = {name: size for name, size in TINY.items() if hasattr(config_class, name)}
    sizes |= {name: size for name, size in TINY_IF_USED.items() if getattr(config_class, name, None)}
    count = "num_layers" if hasattr(config_class, "num_layers") else "num_hidden_layers"
    configs = (config_class(**sizes, **{count: layers}) for layers in range(2, MOST_LAYERS + 1))
    for config in configs:
        if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"linear_attention"}:
            break
    return config
