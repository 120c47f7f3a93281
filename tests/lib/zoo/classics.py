"""Latent attention as well-known code writes it. All take the arguments of `mla.LatentAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from .mla import Spelling
from .norms import hf
from .ropes import by_rotate_half, rotate_half, view_transpose
from .sizes import Weights


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data.copy_(weight)
    return layer


class HfNorm(nn.Module):
    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight.clone()), epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hf(hidden_states, self.weight, self.variance_epsilon)


class TorchNorm(nn.RMSNorm):
    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__(len(weight), eps=epsilon)
        self.weight.data.copy_(weight)


class Classic(nn.Module):
    """The layers under the names they have in transformers."""

    norm: type[nn.Module] = HfNorm

    def __init__(self, spelling: Spelling, weights: Weights) -> None:
        super().__init__()
        self.sizes = sizes = spelling.sizes
        self.n_heads, self.nope, self.rope, self.value = sizes.heads, sizes.nope, sizes.rope, sizes.value
        self.rank, self.scale = sizes.kv_rank, 1.3 * sizes.query**-0.5
        self.is_low_rank = weights.q_down is not None
        if self.is_low_rank:
            self.q_a_proj = linear(weights.q_down)
            self.q_a_layernorm = self.norm(weights.q_gamma, sizes.epsilon)
        self.q_b_proj = linear(weights.q_up)
        self.kv_a_proj_with_mqa = linear(weights.kv_down)
        self.kv_a_layernorm = self.norm(weights.kv_gamma, sizes.epsilon)
        self.kv_b_proj = linear(weights.kv_up)
        self.o_proj = linear(weights.out)

    def query(self, x: Tensor) -> Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)) if self.is_low_rank else x)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(-1, x.size(1), 1, x.size(-1))
    y = torch.view_as_real(x * freqs_cis).flatten(3)
    return y.to(dtype)


class DeepSeekNaive(Classic):
    """deepseek-ai/DeepSeek-V3 inference/model.py, attn_impl "naive", with the latents in the caches."""

    norm = TorchNorm

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, start_pos: int
    ) -> tuple[Tensor, ...]:
        kv_cache, pe_cache = caches
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        q = self.query(x).view(bsz, seqlen, self.n_heads, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = apply_rotary_emb(q_pe, tables[0])
        kv = self.kv_a_proj_with_mqa(x)
        kv, k_pe = torch.split(kv, [self.rank, self.rope], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), tables[0])
        kv_cache[:bsz, start_pos:end_pos] = self.kv_a_layernorm(kv)
        pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
        q = torch.cat([q_nope, q_pe], dim=-1)
        kv = self.kv_b_proj(kv_cache[:bsz, :end_pos]).view(bsz, end_pos, self.n_heads, self.nope + self.value)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        k = torch.cat([k_nope, pe_cache[:bsz, :end_pos].unsqueeze(2).expand(-1, -1, self.n_heads, -1)], dim=-1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.scale
        if mask is not None:
            scores += mask.squeeze(1).unsqueeze(2)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        x = torch.einsum("bsht,bthd->bshd", scores, v)
        return (self.o_proj(x.flatten(2)),)


class DeepSeekAbsorb(Classic):
    """The same file, attn_impl "absorb"."""

    norm = TorchNorm

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, start_pos: int
    ) -> tuple[Tensor, ...]:
        kv_cache, pe_cache = caches
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        q = self.query(x).view(bsz, seqlen, self.n_heads, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = apply_rotary_emb(q_pe, tables[0])
        kv = self.kv_a_proj_with_mqa(x)
        kv, k_pe = torch.split(kv, [self.rank, self.rope], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), tables[0])
        wkv_b = self.kv_b_proj.weight.view(self.n_heads, -1, self.rank)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : self.nope])
        kv_cache[:bsz, start_pos:end_pos] = self.kv_a_layernorm(kv)
        pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
        scores = (
            torch.einsum("bshc,btc->bsht", q_nope, kv_cache[:bsz, :end_pos])
            + torch.einsum("bshr,btr->bsht", q_pe, pe_cache[:bsz, :end_pos])
        ) * self.scale
        if mask is not None:
            scores += mask.squeeze(1).unsqueeze(2)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        x = torch.einsum("bsht,btc->bshc", scores, kv_cache[:bsz, :end_pos])
        x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -self.value :])
        return (self.o_proj(x.flatten(2)),)


class Transformers4(Classic):
    """transformers 4 and DeepSeek's remote code without a cache: view-transpose rope, new_empty, eager softmax."""

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, place: Any
    ) -> tuple[Tensor, ...]:
        bsz, q_len, _ = x.size()
        q = self.query(x).view(bsz, q_len, self.n_heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        compressed_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [self.rank, self.rope], dim=-1)
        k_pe = k_pe.view(bsz, q_len, 1, self.rope).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed_kv))
        kv = kv.view(bsz, q_len, self.n_heads, self.nope + self.value).transpose(1, 2)
        k_nope, value_states = torch.split(kv, [self.nope, self.value], dim=-1)
        cos, sin = (table.unsqueeze(1) for table in tables)
        q_pe, k_pe = view_transpose(q_pe, cos, sin), view_transpose(k_pe, cos, sin)
        query_states = k_pe.new_empty(bsz, self.n_heads, q_len, self.nope + self.rope)
        query_states[:, :, :, : self.nope] = q_nope
        query_states[:, :, :, self.nope :] = q_pe
        key_states = k_pe.new_empty(bsz, self.n_heads, q_len, self.nope + self.rope)
        key_states[:, :, :, : self.nope] = k_nope
        key_states[:, :, :, self.nope :] = k_pe
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scale + mask
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_weights = F.dropout(attn_weights, p=0.0, training=self.training)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2).contiguous()
        return (self.o_proj(attn_output.reshape(bsz, q_len, self.n_heads * self.value)),)


class Megatron(Classic):
    """Megatron-LM: [s, b, h], de-interleaved by a cat of strides, latents appended to a cache."""

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, place: Any
    ) -> tuple[Tensor, ...]:
        q_len, bsz, _ = x.size()
        q = self.query(x).view(q_len, bsz, self.n_heads, self.nope + self.rope)
        q_no_pe, q_pos_emb = torch.split(q, [self.nope, self.rope], dim=-1)
        kv_compressed, k_pos_emb = torch.split(self.kv_a_proj_with_mqa(x), [self.rank, self.rope], dim=-1)
        kv_compressed = self.kv_a_layernorm(kv_compressed)
        k_pos_emb = torch.unsqueeze(k_pos_emb, 2)
        cos, sin = (table.transpose(0, 1).unsqueeze(2) for table in tables)
        q_pos_emb, k_pos_emb = (
            by_rotate_half(torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1), cos, sin) for t in (q_pos_emb, k_pos_emb)
        )
        new_latents = torch.cat((caches[0], kv_compressed.transpose(0, 1)), dim=1)
        new_keys = torch.cat((caches[1], k_pos_emb.squeeze(2).transpose(0, 1)), dim=1)
        kv = self.kv_b_proj(new_latents.transpose(0, 1))
        kv = kv.view(-1, bsz, self.n_heads, self.nope + self.value)
        k_no_pe, value = torch.split(kv, [self.nope, self.value], dim=-1)
        k_pos_emb = new_keys.transpose(0, 1).unsqueeze(2).expand(-1, -1, self.n_heads, -1)
        query, key = torch.cat([q_no_pe, q_pos_emb], dim=-1), torch.cat([k_no_pe, k_pos_emb], dim=-1)
        query, key, value = (t.reshape(t.shape[0], bsz * self.n_heads, -1).transpose(0, 1) for t in (query, key, value))
        scores = torch.bmm(query, key.transpose(1, 2)) * self.scale
        scores = scores.view(bsz, self.n_heads, q_len, -1) + mask
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        context = torch.bmm(probabilities.view(bsz * self.n_heads, q_len, -1), value)
        context = context.view(bsz, self.n_heads, q_len, -1).permute(2, 0, 1, 3).contiguous()
        return self.o_proj(context.view(q_len, bsz, -1)), new_latents, new_keys


class TorchTitan(Classic):
    """pytorch/torchtitan: [b, s, h, d], complex rope, no cache, causal SDPA."""

    norm = TorchNorm

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, place: Any
    ) -> tuple[Tensor, ...]:
        bsz, seqlen, _ = x.size()
        q = self.query(x).view(bsz, seqlen, -1, self.nope + self.rope)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = apply_rotary_emb(q_pe, tables[0])
        q = torch.cat([q_nope, q_pe], dim=-1)
        kv, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [self.rank, self.rope], dim=-1)
        k_pe = apply_rotary_emb(k_pe.unsqueeze(2), tables[0])
        kv = self.kv_b_proj(self.kv_a_layernorm(kv)).view(bsz, seqlen, -1, self.nope + self.value)
        k_nope, v = torch.split(kv, [self.nope, self.value], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=True)
        return (self.o_proj(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)),)


class LitGpt(Classic):
    """Lightning-AI/litgpt without a cache: interleaved rope by a reshape, k_rot viewed as one head."""

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, place: Any
    ) -> tuple[Tensor, ...]:
        bsz, steps, _ = x.size()
        q = self.query(x).view(bsz, steps, -1, self.nope + self.rope).transpose(1, 2)
        q_pass, q_rot = torch.split(q, [self.nope, self.rope], dim=-1)
        k_pass, k_rot = torch.split(self.kv_a_proj_with_mqa(x), [self.rank, self.rope], dim=-1)
        k_pass = self.kv_b_proj(self.kv_a_layernorm(k_pass))
        k_pass = k_pass.view(bsz, steps, self.n_heads, -1).transpose(1, 2)
        k_pass, v = torch.split(k_pass, [self.nope, self.value], dim=-1)
        k_rot = k_rot.view(bsz, 1, steps, self.rope)
        q_rot, k_rot = self.apply_rope(q_rot, *tables), self.apply_rope(k_rot, *tables)
        k_rot = k_rot.expand(*k_pass.shape[:-1], -1)
        q, k = torch.cat((q_pass, q_rot), dim=-1), torch.cat((k_pass, k_rot), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=self.scale)
        return (self.o_proj(y.transpose(1, 2).reshape(bsz, steps, self.n_heads * self.value)),)

    @staticmethod
    def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        bsz, heads, steps, size = x.shape
        x = x.view(bsz, heads, steps, size // 2, 2).transpose(4, 3).reshape(bsz, heads, steps, size)
        roped = (x * cos.unsqueeze(1)) + (rotate_half(x) * sin.unsqueeze(1))
        return roped.to(dtype=x.dtype)


class SgLang(Classic):
    """sglang: tokens first, slices, absorbed by bmm over heads, rows into slots."""

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, slots: Tensor
    ) -> tuple[Tensor, ...]:
        bsz, steps, _ = x.shape
        x = x.reshape(bsz * steps, -1)
        q = self.query(x).view(-1, self.n_heads, self.nope + self.rope)
        q_nope, q_pe = q.split([self.nope, self.rope], dim=-1)
        latent_cache = self.kv_a_proj_with_mqa(x)
        k_nope = self.kv_a_layernorm(latent_cache[..., : self.rank]).unsqueeze(1)
        k_pe = latent_cache[..., self.rank :].unsqueeze(1)
        w_kc, w_vc = self.kv_b_proj.weight.unflatten(0, (-1, self.nope + self.value)).split([self.nope, self.value], 1)
        q_nope_out = torch.bmm(q_nope.transpose(0, 1), w_kc).transpose(0, 1)
        cos, sin = (table.expand(bsz, steps, -1).reshape(-1, 1, self.rope // 2) for table in tables)
        q_pe, k_pe = self.forward_native(q_pe, cos, sin), self.forward_native(k_pe, cos, sin)
        for cache, rows in zip(caches, (k_nope, k_pe), strict=True):
            cache.view(-1, 1, cache.shape[-1])[slots] = rows
        latents, keys = (cache.view(bsz, -1, cache.shape[-1]) for cache in caches)
        q_nope_out, q_pe = (t.view(bsz, steps, self.n_heads, -1).transpose(1, 2) for t in (q_nope_out, q_pe))
        scores = q_nope_out @ latents.mT.unsqueeze(1) + q_pe @ keys.mT.unsqueeze(1)
        weights = torch.softmax((scores * self.scale + mask).float(), dim=-1).to(x.dtype)
        attn_output = (weights @ latents.unsqueeze(1)).transpose(1, 2).reshape(-1, self.n_heads, self.rank)
        out = torch.bmm(attn_output.transpose(0, 1), w_vc.transpose(1, 2))
        return (self.o_proj(out.transpose(0, 1).flatten(1, 2)).view(bsz, steps, -1),)

    @staticmethod
    def forward_native(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x[..., ::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


class Vllm(Classic):
    """vLLM: one down projection for both, the query's rotary part assigned in place, tables looked up by position."""

    def __init__(self, spelling: Spelling, weights: Weights) -> None:
        super().__init__(spelling, weights)
        self.q_rank = spelling.sizes.q_rank
        self.fused_qkv_a_proj = linear(torch.cat((weights.q_down, weights.kv_down)))
        del self.q_a_proj, self.kv_a_proj_with_mqa

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, slot_mapping: Tensor
    ) -> tuple[Tensor, ...]:
        bsz, steps, _ = x.shape
        x = x.reshape(bsz * steps, -1)
        q_c, kv_lora = self.fused_qkv_a_proj(x).split([self.q_rank, self.rank + self.rope], dim=-1)
        kv_c, k_pe = kv_lora.split([self.rank, self.rope], dim=-1)
        kv_c_normed = self.kv_a_layernorm(kv_c)
        q = self.q_b_proj(self.q_a_layernorm(q_c)).view(-1, self.n_heads, self.nope + self.rope)
        k_pe = k_pe.unsqueeze(1)
        flat = positions.expand(bsz, steps).flatten()
        cos, sin = (table.index_select(0, flat).unsqueeze(1) for table in tables)
        q[..., self.nope :], k_pe = self.rotary(q[..., self.nope :], cos, sin), self.rotary(k_pe, cos, sin)
        caches[0].flatten(0, 1).index_copy_(0, slot_mapping, kv_c_normed)
        caches[1].flatten(0, 1).index_copy_(0, slot_mapping, k_pe.squeeze(1))
        latents, keys = (cache.view(bsz, -1, cache.shape[-1]) for cache in caches)
        k_nope, v = (
            self.kv_b_proj(latents)
            .view(bsz, -1, self.n_heads, self.nope + self.value)
            .split([self.nope, self.value], dim=-1)
        )
        k = torch.cat((k_nope, keys.unsqueeze(2).expand(*k_nope.shape[:-1], -1)), dim=-1)
        q = q.view(bsz, steps, self.n_heads, -1)
        v = F.pad(v, [0, q.shape[-1] - v.shape[-1]], value=0)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(1, 2)
        return (self.o_proj(out[..., : self.value].reshape(bsz, steps, -1)),)

    @staticmethod
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


class ExpandedCache(Classic):
    """transformers 4 with a cache of expanded keys and values, and litgpt: `caches` hold [B, H, T, D]."""

    def forward(
        self, x: Tensor, tables: Any, positions: Tensor, mask: Tensor | None, caches: Any, place: Any
    ) -> tuple[Tensor, ...]:
        bsz, q_len, _ = x.size()
        q = self.query(x).view(bsz, q_len, self.n_heads, self.nope + self.rope).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        compressed_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed_kv))
        kv = kv.view(bsz, q_len, self.n_heads, self.nope + self.value).transpose(1, 2)
        k_nope, value = torch.split(kv, [self.nope, self.value], dim=-1)
        cos, sin = (table.unsqueeze(1) for table in tables)
        q_pe, k_pe = view_transpose(q_pe, cos, sin), view_transpose(k_pe.unsqueeze(1), cos, sin)
        query = torch.cat((q_nope, q_pe), dim=-1)
        key = torch.cat((k_nope, k_pe.expand(-1, self.n_heads, -1, -1)), dim=-1)
        keys, values = torch.cat((caches[0], key), dim=2), torch.cat((caches[1], value), dim=2)
        scores = query @ keys.transpose(2, 3) / math.sqrt(1 / self.scale**2) + mask
        out = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ values
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1)), keys, values
