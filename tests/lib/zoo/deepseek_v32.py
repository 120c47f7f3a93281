"""deepseek-ai/DeepSeek-V3.2-Exp inference/model.py, its kernels restated in PyTorch: a latent attention layer whose
indexer keeps its keys as codes of 8 bits with a scale each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .classics import TorchNorm, apply_rotary_emb, linear
from .sizes import SMALL, weights

HEADS, WIDTH, CHOSEN, ROOM = 8, 16, 4, 40  # of the indexer: heads, columns, keys of a token; rows of the caches
CODES, LARGEST = torch.float8_e4m3fn, 448.0


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def act_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a scale for each row."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return (x / scale).clamp(-LARGEST, LARGEST).to(CODES), scale


def fp8_index(q: Tensor, weights: Tensor, k: Tensor, k_scale: Tensor) -> Tensor:
    logits = torch.einsum("bshd,btd->bsht", q.float(), k.float()).relu()
    return (logits * weights).sum(2) * k_scale.squeeze(-1).unsqueeze(1)


def hadamard(size: int) -> Tensor:
    made = torch.ones(1, 1)
    while len(made) < size:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return made


def rotated_halves(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Pairs of columns that are half of the columns apart."""
    turned = apply_rotary_emb(x.unflatten(-1, (2, -1)).mT.flatten(-2), freqs_cis)
    return turned.unflatten(-1, (-1, 2)).mT.flatten(-2)


class Indexer(nn.Module):
    def __init__(self, hidden: int, q_rank: int, rope: int, batch: int) -> None:
        super().__init__()
        self.rope = rope
        self.wq_b = linear(draw(HEADS * WIDTH, q_rank, seed=1) * q_rank**-0.5)
        self.wk = linear(draw(WIDTH, hidden, seed=2) * hidden**-0.5)
        self.k_norm = nn.LayerNorm(WIDTH)
        self.k_norm.weight.data = 1 + 0.3 * draw(WIDTH, seed=3)
        self.k_norm.bias.data = 0.3 * draw(WIDTH, seed=4)
        self.weights_proj = linear(draw(HEADS, hidden, seed=5) * hidden**-0.5)
        self.register_buffer("hadamard", hadamard(WIDTH))
        self.register_buffer("k_cache", draw(batch, ROOM, WIDTH, seed=6).to(CODES))
        self.register_buffer("k_scale_cache", 1e-2 * draw(batch, ROOM, 1, seed=7).abs())

    def forward(self, x: Tensor, qr: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.size()
        end_pos = start_pos + seqlen
        q = self.wq_b(qr).view(bsz, seqlen, HEADS, WIDTH)
        q_pe, q_nope = torch.split(q, [self.rope, WIDTH - self.rope], dim=-1)
        q = torch.cat([rotated_halves(q_pe, freqs_cis), q_nope], dim=-1)
        k_pe, k_nope = torch.split(self.k_norm(self.wk(x)), [self.rope, WIDTH - self.rope], dim=-1)
        k = torch.cat([rotated_halves(k_pe.unsqueeze(2), freqs_cis).squeeze(2), k_nope], dim=-1)
        q_fp8, q_scale = act_quant(q @ self.hadamard * WIDTH**-0.5)
        k_fp8, k_scale = act_quant(k @ self.hadamard * WIDTH**-0.5)
        self.k_cache[:bsz, start_pos:end_pos] = k_fp8
        self.k_scale_cache[:bsz, start_pos:end_pos] = k_scale
        weights = self.weights_proj(x.float()) * HEADS**-0.5
        weights = weights.unsqueeze(-1) * q_scale * WIDTH**-0.5
        index_score = fp8_index(q_fp8, weights, self.k_cache[:bsz, :end_pos], self.k_scale_cache[:bsz, :end_pos])
        if mask is not None:
            index_score += mask
        return index_score.topk(min(CHOSEN, end_pos), dim=-1)[1]


class DeepSeekV32(nn.Module):
    """Hidden states and the first position. Prompts expand keys and values, steps absorb the query."""

    def __init__(self, batch: int = 2) -> None:
        super().__init__()
        z = self.z = SMALL
        w = weights(z)
        self.wq_a, self.wq_b, self.wkv_a = linear(w.q_down), linear(w.q_up), linear(w.kv_down)
        self.wkv_b, self.wo = linear(w.kv_up), linear(w.out)
        self.q_norm, self.kv_norm = TorchNorm(w.q_gamma, z.epsilon), TorchNorm(w.kv_gamma, z.epsilon)
        self.indexer = Indexer(z.hidden, z.q_rank, z.rope, batch)
        self.register_buffer("kv_cache", draw(batch, ROOM, z.kv_rank, seed=8))
        self.register_buffer("pe_cache", draw(batch, ROOM, z.rope, seed=9))
        angles = 3 * draw(ROOM, z.rope // 2, seed=10)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        z, (bsz, seqlen, _) = self.z, x.size()
        end_pos = start_pos + seqlen
        freqs_cis = self.freqs_cis[start_pos:end_pos]
        mask = torch.full((seqlen, seqlen), float("-inf")).triu_(1) if seqlen > 1 else None
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).view(bsz, seqlen, z.heads, z.nope + z.rope)
        q_nope, q_pe = torch.split(q, [z.nope, z.rope], dim=-1)
        q_pe = apply_rotary_emb(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [z.kv_rank, z.rope], dim=-1)
        kv, k_pe = self.kv_norm(kv), apply_rotary_emb(k_pe.unsqueeze(2), freqs_cis)
        self.kv_cache[:bsz, start_pos:end_pos] = kv
        self.pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
        scale = (z.nope + z.rope) ** -0.5
        topk_indices = self.indexer(x, qr, start_pos, freqs_cis, mask)
        if mask is not None:
            kv = self.wkv_b(kv).view(bsz, seqlen, z.heads, z.nope + z.value)
            k_nope, v = torch.split(kv, [z.nope, z.value], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, z.heads, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", torch.cat([q_nope, q_pe], dim=-1), k) * scale
            index_mask = torch.full((bsz, seqlen, seqlen), float("-inf")).scatter_(-1, topk_indices, 0)
            index_mask += mask
            scores += index_mask.unsqueeze(2)
            x = torch.einsum("bsht,bthd->bshd", scores.softmax(dim=-1), v)
        else:
            wkv_b = self.wkv_b.weight.view(z.heads, -1, z.kv_rank)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : z.nope])
            scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:bsz, :end_pos])
            scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:bsz, :end_pos])) * scale
            index_mask = torch.full((bsz, 1, end_pos), float("-inf")).scatter_(-1, topk_indices, 0)
            scores += index_mask.unsqueeze(2)
            x = torch.einsum("bsht,btc->bshc", scores.softmax(dim=-1), self.kv_cache[:bsz, :end_pos])
            x = torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -z.value :])
        return self.wo(x.flatten(2))
