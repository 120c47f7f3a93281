"""DeepSeek-V3's attention absorbed by hand, in the plain PyTorch of an expert: a baseline for mla_fx."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave


class HandAbsorbed(nn.Module):
    """Attention over the cached latents. Uses a DeepseekV3Attention's own weights; kv_b through views."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Any) -> Tensor:
        layer = self.layer
        batch, steps, _ = x.shape
        nope, rank, rotary = layer.qk_nope_head_dim, layer.kv_lora_rank, layer.qk_rope_head_dim

        query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        query = query.view(batch, steps, layer.num_heads, nope + rotary).transpose(1, 2)
        q_nope, q_rope = query.split([nope, rotary], dim=-1)

        latent, k_rope = layer.kv_a_proj_with_mqa(x).split([rank, rotary], dim=-1)
        latent = layer.kv_a_layernorm(latent).unsqueeze(1)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope.unsqueeze(1), cos, sin)
        latents, k_ropes = cache.update(latent, k_rope, layer.layer_idx)
        latents, k_ropes = latents.squeeze(1), k_ropes.squeeze(1)

        w_uk, w_uv = layer.kv_b_proj.weight.view(layer.num_heads, -1, rank).split([nope, layer.v_head_dim], dim=1)
        q_latent = torch.einsum("bhsd,hdr->bhsr", q_nope, w_uk)
        scores = torch.einsum("bhsr,btr->bhst", q_latent, latents) + torch.einsum("bhsr,btr->bhst", q_rope, k_ropes)
        scores = (scores * layer.scaling).masked_fill(~mask, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(x.dtype)
        context = torch.einsum("bhst,btr->bhsr", probabilities, latents)
        values = torch.einsum("bhsr,hvr->bshv", context, w_uv)
        return layer.o_proj(values.reshape(batch, steps, -1))
