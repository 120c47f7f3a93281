"""Layers with keys and values per head as int8 codes in pages, with a scale for each column, given with the model."""

import torch
from torch import nn

from lib.paged_heads import (
    HEADS,
    Gqa,
    arguments,
)

STEPS = 40  # codes for one


class Codes:
    """Makes a layer of paged_heads.py one that stores codes. Tests override its pieces."""

    def __init__(self, sizes=None):
        super().__init__(sizes)
        z, draw = self.sizes, torch.Generator().manual_seed(5)
        shapes = [(z.kv_heads, z.width), (z.kv_heads, z.columns)]
        drawn = [torch.rand(shape, generator=draw, dtype=torch.float64) for shape in (*shapes, *shapes)]
        self.key_scale, self.value_scale = (nn.Buffer((0.5 + part) / STEPS) for part in drawn[:2])
        self.key_zero, self.value_zero = (nn.Buffer((30 * part - 15).round()) for part in drawn[2:])

    def project(self, x):
        query, key, value = super().project(x)
        return query, self.codes(key, self.key_scale), self.codes(value, self.value_scale)

    def codes(self, rows, scale):
        return (rows / scale).round().clamp(-128, 127).to(torch.int8)

    def keys(self, key):
        return super().keys(self.numbers(key, self.key_scale, self.key_zero))

    def values(self, value):
        return super().values(self.numbers(value, self.value_scale, self.value_zero))

    def numbers(self, codes, scale, zero):
        """[B, T, Hkv, columns]."""
        return codes.to(scale.dtype) * scale


class Coded(Codes, Gqa):
    pass


class ZeroPoints(Coded):
    def codes(self, rows, scale):
        zero = self.key_zero if scale is self.key_scale else self.value_zero
        return (rows / scale + zero).round().clamp(-128, 127).to(torch.int8)

    def numbers(self, codes, scale, zero):
        return (codes.to(scale.dtype) - zero) * scale


def coded(kind):
    """A layer of paged_heads.py, with codes."""
    return type(f"Coded{kind.__name__}", (Codes, kind), {})


def in_codes(given):
    """The same arguments with caches of codes."""
    caches = ((cache.double() * STEPS).round().clamp(-128, 127).to(torch.int8) for cache in given[3:])
    return *given[:3], *caches


def given(module, dtype=torch.float64):
    return in_codes(arguments(module.sizes, dtype))


class InFloat32(Coded):
    """Dequantised in float32 at least and rounded once."""

    def numbers(self, codes, scale, zero):
        return (codes.float() * scale.to(torch.promote_types(scale.dtype, torch.float32))).to(scale.dtype)


class OfHeads(Coded):
    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype) * scale[:, :1]


class KeysAlone(Coded):
    """Values are stored as they are."""

    def codes(self, rows, scale):
        return super().codes(rows, scale) if scale is self.key_scale else rows

    def values(self, value):
        return value


class ZerosOfKeys(ZeroPoints):
    def values(self, value):
        return value.to(self.value_scale.dtype) * self.value_scale


class ScaledQuery(Coded):
    """The scale of keys multiplies the query, that of values the result: keys and values are the codes."""

    def attend(self, query, key, value, positions):
        group = HEADS // self.kv_heads
        scales = (scale.repeat_interleave(group, 0) for scale in (self.key_scale, self.value_scale))
        of_keys, of_values = scales
        return super().attend(query * of_keys, key, value, positions) * of_values

    def numbers(self, codes, scale, zero):
        return codes.to(scale.dtype)
