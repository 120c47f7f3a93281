"""A layer whose cache has packed rows: int8 latents, the bytes of rotary keys and those of scales of tiles."""

import copy
import functools

import torch
from torch import nn
from torch.nn.functional import linear

from lib import layers
from lib.layers import Rewritten

PROLOG, RULE, ATTENTION = "mla_prolog_v3", "mla_prolog_packed", "latent_attention"
BOTH = {PROLOG: 1, ATTENTION: 1}
SLOTS, TOKENS, HEADS, RANK = 48, 3, 4, 256
HE, HCQ, D, DR, DV = 64, 48, 16, 8, 12
BF16, F16 = torch.bfloat16, torch.float16


def by_rows(weight):
    scales = weight.float().abs().amax(1) / 127
    return (weight.float() / scales.unsqueeze(1)).round().to(torch.int8), scales


def bytes_of(x):
    return x.contiguous().view(torch.int8)


class Packed(nn.Module):
    """One layer with an int8 query projection; tests override methods."""

    lead, tile, key_dtype, order = (), 128, None, ("codes", "keys", "scales")
    scale_dtype = torch.float32

    def __init__(self, dtype=BF16):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def dense(*sizes, fan_in=1):
            return (torch.randn(*sizes, generator=generator) * fan_in**-0.5).to(dtype)

        self.key_dtype = self.key_dtype or dtype
        parts = {
            "q_a": dense(HCQ, HE, fan_in=HE),
            "kv_a": dense(RANK + DR, HE, fan_in=HE),
            "kv_b": dense(HEADS * (D + DV), RANK, fan_in=RANK),
            "o": dense(HE, HEADS * DV, fan_in=HEADS * DV),
            "q_gamma": 1 + 0.3 * dense(HCQ),
            "kv_gamma": 1 + 0.3 * dense(RANK),
            "alpha": torch.tensor([0.8125]),
            "alphas": torch.tensor([[0.9], [0.7]]),
        }
        parts["q_b"], parts["q_b_scales"] = by_rows(dense(HEADS * (D + DR), HCQ, fan_in=HCQ))
        for name, value in parts.items():
            self.register_buffer(name, value)
        rows = self.rows(dense(SLOTS, RANK).float(), dense(SLOTS, DR).to(self.key_dtype))
        self.cache = nn.Buffer(rows.view(*self.lead, *rows.shape) if self.lead else rows)

    def forward(self, x, cos, sin, slots):
        batch = len(x)
        q_nope, q_rope = self.query(x).view(batch, -1, HEADS, D + DR).split([D, DR], dim=-1)
        latent, k_rope = self.down(x).split([RANK, DR], dim=-1)
        q_rope = self.rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        k_rope = self.rotate(k_rope, cos, sin).to(self.key_dtype)
        self.write(self.rows(self.norm(latent, self.kv_gamma), k_rope), slots)
        latents, keys = self.unpacked()
        latents, keys = latents.reshape(batch, SLOTS, -1).to(x.dtype), keys.reshape(batch, SLOTS, 1, DR).to(x.dtype)
        key, value = linear(latents, self.kv_b).view(batch, SLOTS, HEADS, D + DV).split([D, DV], dim=-1)
        key = torch.cat((key, keys.expand(-1, -1, HEADS, -1)), -1)
        scores = torch.einsum("bsnd,btnd->bnst", torch.cat((q_nope, q_rope), -1), key) * (D + DR) ** -0.5
        scores = scores.masked_fill(torch.arange(SLOTS) > slots[:, None], -torch.inf)
        return linear(torch.einsum("bnst,btnv->bsnv", scores.softmax(-1), value).flatten(2), self.o)

    def query(self, x):
        return self.product(self.norm(linear(x, self.q_a), self.q_gamma), "q_b").to(x.dtype)

    def product(self, x, name):
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        codes = (x.float() / scales).round().to(torch.int8)
        return (codes.int() @ getattr(self, name).int().t()).float() * scales * getattr(self, f"{name}_scales")

    def down(self, x):
        return linear(x, self.kv_a)

    def norm(self, x, gamma):
        wide = x.float()
        return wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.float()

    def rotate(self, x, cos, sin):
        even, odd = x.float()[..., ::2], x.float()[..., 1::2]
        cos, sin = (table.float().chunk(2, -1) for table in (cos, sin))
        return torch.cat((even * cos[0] - odd * sin[0], odd * cos[1] + even * sin[1]), -1).to(self.q_a.dtype)

    def rows(self, latent, keys):
        codes, scales = self.tiles(latent.unflatten(-1, (-1, self.tile)))
        scales = bytes_of(scales.squeeze(-1).to(self.scale_dtype))
        return self.joined(self.placed({"codes": codes.flatten(-2), "keys": bytes_of(keys), "scales": scales}))

    def placed(self, parts):
        """The parts with their bytes in another order; doing it twice undoes it."""
        return parts

    def joined(self, parts):
        return torch.cat([parts[name] for name in self.order], -1)

    def tiles(self, x):
        scales = x.abs().amax(-1, keepdim=True) * (1 / 127)
        return (x * scales.reciprocal()).round().to(torch.int8), scales

    def write(self, rows, slots):
        self.cache.index_copy_(0, slots, rows[0])

    def unpacked(self):
        widths = {"codes": RANK, "keys": self.key_dtype.itemsize * DR}
        widths["scales"] = self.scale_dtype.itemsize * RANK // self.tile
        pieces = self.cache.split([widths[name] for name in self.order], -1)
        parts = self.placed(dict(zip(self.order, pieces, strict=True)))
        scales = parts["scales"].view(self.scale_dtype).float().unsqueeze(-1)
        values = self.numbers(parts["codes"].unflatten(-1, (-1, self.tile))) * scales
        return values.flatten(-2), parts["keys"].view(self.key_dtype)

    def numbers(self, codes):
        return codes.float()


variant = functools.partial(layers.variant, kind=Packed)

def given(dtype=BF16, batch=1):
    generator = torch.Generator().manual_seed(1)
    angle = torch.rand(TOKENS, DR // 2, generator=generator).repeat(1, 2) * 6
    x = torch.randn(batch, TOKENS, HE, generator=generator)
    x[:, 1] = 0  # a row without a largest value
    return *(value.to(dtype) for value in (x, angle.cos(), angle.sin())), torch.arange(38, 38 + TOKENS)


def fused(layer, *inputs, **options):
    """The report on a layer, after its output and its cache were compared with those of eager mode. Rows are equal,
    unless the vendor's codes are asked for."""
    theirs = copy.deepcopy(layer)
    wanted = theirs(*inputs)
    run = Rewritten(layer, **options)
    found = run(*inputs)
    assert (found - wanted).norm() <= 2e-2 * wanted.norm()
    if options.get("quant") != "vendor":
        assert torch.equal(layer.cache, theirs.cache)
    return run.report


def reasons(report):
    return [miss.reason for miss in report.misses if miss.pattern == RULE]


class AllInt8(Packed):
    """q_a and kv_a are int8, too; latents stay in float32 until they are quantised."""

    def __init__(self, dtype=BF16):
        super().__init__(dtype)
        for name in ("q_a", "kv_a"):
            codes, scales = by_rows(getattr(self, name))
            setattr(self, f"{name}_codes", nn.Buffer(codes))
            setattr(self, f"{name}_codes_scales", nn.Buffer(scales))

    def query(self, x):
        return self.product(self.norm(self.product(x, "q_a_codes"), self.q_gamma), "q_b").to(x.dtype)

    def down(self, x):
        return self.product(x, "kv_a_codes")


class Pages(Packed):
    """Pages of 16 slots, written by block and offset."""

    def __init__(self, dtype=BF16):
        super().__init__(dtype)
        self.cache = self.cache.unflatten(0, (-1, 16)).unsqueeze(2)

    def write(self, rows, slots):
        self.cache[slots // 16, slots % 16] = rows[0].unsqueeze(1)


class ClippedByNumber(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * 0.8125
        scales = bound * (1 / 127)
        return (x.clamp(-bound, bound) * (1 / scales)).round().to(torch.int8), scales


class ClippedByParameter(Packed):
    def tiles(self, x):
        bound = x.abs().amax(-1, keepdim=True) * self.alpha
        scales = bound * (1 / 127)
        clipped = torch.minimum(x, bound).maximum(-bound)
        return (clipped * scales.reciprocal()).round().clamp(-128, 127).to(torch.int8), scales
