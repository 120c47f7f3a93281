"""Layers over caches of int8 codes, in pages and in one piece, at sizes that the vendor's kernels take."""

from dataclasses import replace

import torch
from lib.coded_pages import CodedPages, given
from lib.layers import Sizes

REAL = Sizes(context=256, hidden=1024, query_rank=96, rank=512, nope=128, rope=64, value=128)


class Pages(CodedPages):
    """Latents and rotary keys are columns of the hidden states: products in 16 bits depend on the machine."""

    def __init__(self, context=256, block=32):
        super().__init__(torch.bfloat16, replace(REAL, context=context), block)

    def project(self, x):
        return x[..., : self.sizes.rank + self.sizes.rope]


class Contiguous(Pages):
    """Caches [B, 1, T, width]."""

    def write(self, cache, slots, rows):
        cache.index_copy_(2, slots, rows)

    def read(self, cache):
        return cache

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        return self.stored(latent, position, kv_cache), self.stored_key(k_rope, position, kr_cache)


def inputs(layer):
    *rest, caches = given(layer)
    if isinstance(layer, Contiguous):
        z = layer.sizes
        caches = tuple(cache[:-2].reshape(z.batch, 1, z.context, -1) for cache in caches)
    return *rest, caches
