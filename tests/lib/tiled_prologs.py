"""A layer with DeepSeek-V3.2's prolog: an int8 query projection, and latents as codes of tiles and their scales."""

import torch
from torch import nn
from torch.nn.functional import linear

SLOTS, TOKENS, HEADS = 48, 5, 4
HE, HCQ, D, DR, DV = 64, 48, 16, 8, 12
CACHES = ("kv_cache", "scale_cache", "kr_cache")
F32, BF16 = torch.float32, torch.bfloat16


def largest(x):
    return x.float().abs().amax(-1, keepdim=True)


def quantised(x, factor, scales):
    return (x.float() * factor).round().to(torch.int8), scales


def by_a_true_quotient(x):
    factor = torch.full_like(largest(x), 127.0) / largest(x)
    return quantised(x, factor, 1 / factor)


class Tiled(nn.Module):
    """One layer; tests override methods."""

    rank, tile_count = 128, 4

    def __init__(self, dtype=F32, quantise=by_a_true_quotient):
        super().__init__()
        self.quantise = quantise
        generator = torch.Generator().manual_seed(0)

        def dense(*sizes, fan_in=1):
            return (torch.randn(*sizes, generator=generator) * fan_in**-0.5).to(dtype)

        q_b = dense(HEADS * (D + DR), HCQ, fan_in=HCQ).float()
        scales = q_b.abs().amax(1) / 127
        self.q_a, self.kv_a = dense(HCQ, HE, fan_in=HE), dense(self.rank + DR, HE, fan_in=HE)
        self.kv_b, self.o = dense(HEADS * (D + DV), self.rank, fan_in=self.rank), dense(HE, HEADS * DV)
        self.q_gamma, self.kv_gamma = 1 + 0.3 * dense(HCQ), 1 + 0.3 * dense(self.rank)
        self.q_b, self.q_b_scales = (q_b / scales.unsqueeze(1)).round().to(torch.int8), scales
        codes, scales = by_a_true_quotient(dense(SLOTS, self.rank).unflatten(-1, (self.tile_count, -1)))
        self.kv_cache, self.scale_cache = codes.flatten(1), scales.squeeze(-1)
        self.kr_cache = dense(SLOTS, DR)
        for name, value in [item for item in vars(self).items() if isinstance(item[1], torch.Tensor)]:
            delattr(self, name)
            self.register_buffer(name, value)

    def forward(self, x, cos, sin, slots):
        q_nope, q_rope = self.query(x).view(len(x), -1, HEADS, D + DR).split([D, DR], dim=-1)
        latent, k_rope = linear(x, self.kv_a).split([self.rank, DR], dim=-1)
        q_rope = self.rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        codes, scales = self.tiles(self.norm(latent, self.kv_gamma))
        rows = codes, scales, self.rotate(k_rope, cos, sin)
        old = self.scale_cache.clone()
        for name, new in zip(CACHES, rows, strict=True):
            self.write(getattr(self, name), slots, new)
        latents = self.dequantised(self.kv_cache, self.scale_cache, old).view(len(x), SLOTS, -1).to(x.dtype)
        key, value = linear(latents, self.kv_b).view(len(x), SLOTS, HEADS, D + DV).split([D, DV], dim=-1)
        key = torch.cat((key, self.kr_cache.view(len(x), SLOTS, 1, DR).expand(-1, -1, HEADS, -1)), -1)
        scores = torch.einsum("bsnd,btnd->bnst", torch.cat((q_nope, q_rope), -1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(SLOTS) > slots[:, None] % SLOTS, -torch.inf)
        return linear(torch.einsum("bnst,btnv->bsnv", scores.softmax(-1), value).flatten(2), self.o)

    def query(self, x):
        codes, scales = self.quantise_query(self.norm(linear(x, self.q_a), self.q_gamma))
        product = torch.matmul(codes.to(torch.int32), self.q_b.to(torch.int32).t()).float()
        return (product * scales * self.q_b_scales).to(x.dtype)

    def quantise_query(self, x):
        return by_a_true_quotient(x)

    def norm(self, x, gamma):
        """Follows the vendor's kernel, so that not even the last bit of a float32 differs."""
        wide = x.float()
        mean = (wide * wide * (1 / x.shape[-1])).sum(-1, keepdim=True)
        root = (mean + 1e-6).double().sqrt().float()
        return (gamma.float() * (wide * root.reciprocal())).to(x.dtype)

    def rotate(self, x, cos, sin):
        even, odd = x.float()[..., ::2], x.float()[..., 1::2]
        cos, sin = (table.float().chunk(2, -1) for table in (cos, sin))
        return torch.cat((even * cos[0] - odd * sin[0], odd * cos[1] + even * sin[1]), -1).to(x.dtype)

    def tiles(self, latent):
        codes, scales = self.quantise(latent.unflatten(-1, (self.tile_count, -1)))
        return codes.flatten(-2), scales.squeeze(-1)

    def write(self, cache, slots, rows):
        cache.index_copy_(0, slots, rows[0])

    def dequantised(self, codes, scales, old_scales):
        return codes.unflatten(-1, (self.tile_count, -1)).float() * scales.unsqueeze(-1)


def given(dtype=F32, batch=1):
    generator = torch.Generator().manual_seed(1)
    angle = torch.rand(TOKENS, DR // 2, generator=generator).repeat(1, 2) * 6
    slots = torch.arange(SLOTS - TOKENS - 2, SLOTS - 2)
    x = torch.randn(batch, TOKENS, HE, generator=generator)
    x[:, 2] = 0  # a row without a largest value
    return *(value.to(dtype) for value in (x, angle.cos(), angle.sin())), slots
