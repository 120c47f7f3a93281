"""Calls of the operators at sizes that the vendor's kernels take: DeepSeek-V3's, and the smallest."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.mla_prolog.samples import integers, scale

BF16 = torch.bfloat16
D, HCKV, DR = 128, 512, 64
B, S, BLOCKS, PAGE = 2, 3, 4, 128


@dataclass(frozen=True)
class Sizes:
    he: int
    n: int
    hcq: int = 1536


FULL, SMALL = Sizes(7168, 128), Sizes(1024, 4)


# --- mla_prolog ---------------------------------------------------------------------------------------------------


@functools.cache
def weights(quantised=0, z=FULL):
    """The weights of one layer; 1: weight_uq_qr is int8; 2: what meets the tokens too."""
    draw = Sampler(BF16)

    def weight(rows, columns, int8):
        return integers(draw, rows, columns) if int8 else draw.weight(rows, columns, fan_in=rows)

    return (
        weight(z.he, z.hcq, quantised == 2),
        weight(z.hcq, z.n * (D + DR), quantised > 0),
        draw.weight(z.n, D, HCKV, fan_in=D),
        weight(z.he, HCKV + DR, quantised == 2),
        draw.gamma(z.hcq),
        draw.gamma(HCKV),
    )


def prolog_call(cache_mode, tokens=(B, S), z=FULL):
    """Arguments of mla_prolog; the first token has no place."""
    draw = Sampler(BF16, seed=1)
    index = draw.slots(torch.Size(tokens).numel(), BLOCKS * PAGE, skip=1).view(tokens)
    fresh = cache_mode == "TND"
    lead = (*tokens, 1) if fresh else (BLOCKS, PAGE, 1)
    tables = draw.tables(*tokens, DR)
    caches = draw.normal(*lead, HCKV), draw.normal(*lead, DR)
    return [draw.normal(*tokens, z.he), *weights(z=z), *tables, None if fresh else index, *caches]


# --- mla_prolog_v3 ------------------------------------------------------------------------------------------------


def v3_call(weight_quant_mode, kv_cache_quant_mode, cache_mode="PA_BSND", z=FULL):
    """Arguments of mla_prolog_v3 in its modes; the first token has no place."""
    draw, packed = Sampler(BF16, seed=3), kv_cache_quant_mode == 3
    some, full = weight_quant_mode > 0, weight_quant_mode == 2
    token_x, *_, index, kv_cache, kr_cache = prolog_call(cache_mode, z=z)
    if kv_cache_quant_mode:
        kv_cache = integers(draw, *kv_cache.shape[:-1], 656 if packed else HCKV)
    if kv_cache_quant_mode == 2:
        kr_cache = integers(draw, *kr_cache.shape)
    args = [
        integers(draw, B, S, z.he) if full else token_x,
        *weights(weight_quant_mode, z),
        *draw.tables(B, S, DR),
        kv_cache,
        draw.normal(0) if packed else kr_cache,
        index,
        scale(draw, B * S, 1 / 40).T if full else None,
        scale(draw, z.hcq, z.he**-0.5 / 40) if full else None,
        scale(draw, z.n * (D + DR), z.hcq**-0.5 / 40) if some else None,
        scale(draw, HCKV + DR, z.he**-0.5 / 40) if full else None,
        {1: torch.tensor([35.0]), 2: scale(draw, HCKV, 35)}.get(kv_cache_quant_mode),
        scale(draw, DR, 35) if kv_cache_quant_mode == 2 else None,
        scale(draw, z.hcq, 1) if some else None,
        None,
        torch.tensor([0.85]) if packed else None,
    ]
    modes = {
        "cache_mode": cache_mode,
        "weight_quant_mode": weight_quant_mode,
        "kv_cache_quant_mode": kv_cache_quant_mode,
        "query_quant_mode": int(kv_cache_quant_mode == 1),
        "ckvkr_repo_mode": int(packed),
        "quant_scale_repo_mode": int(packed),
    }
    return args, modes


def blocks_call(cache_mode="PA_BLK_BSND", z=SMALL):
    """Arguments for three sequences; the second fills a page and a part of another, and the first page is skipped."""
    args = prolog_call("PA_BSND", (134,), z)
    blocks = Sampler(BF16, seed=8).slots(4, BLOCKS, skip=1)
    return [*args[:9], *args[10:], blocks, *[None] * 7, torch.tensor([3, 133, 134])], {"cache_mode": cache_mode}


# --- kv_rmsnorm_rope_cache ----------------------------------------------------------------------------------------


def kv_call(cache_mode, int8=False, shared=False):
    """Arguments of kv_rmsnorm_rope_cache; the first token, or page, has no place. kv is not contiguous."""
    draw = Sampler(BF16, seed=4)
    norm, rows = cache_mode == "Norm", 1 if shared else B
    blocked, slots = "BLK" in cache_mode, BLOCKS * PAGE
    index = draw.slots(B, BLOCKS, skip=1) * PAGE if blocked else draw.slots(rows * S, slots, skip=1)
    lead = (B, 1, BLOCKS * PAGE) if norm else (BLOCKS, PAGE, 1)
    caches = [integers(draw, *lead, width) if int8 else draw.normal(*lead, width) for width in (DR, HCKV)]
    scales = [scale(draw, width, 40).squeeze(0) for width in (DR, HCKV)] if int8 else [None, None]
    kv = draw.normal(B, 1, S, 100 + HCKV + DR)[..., 100:]
    tables = draw.tables(rows, 1, S, DR)
    return [kv, draw.gamma(HCKV), *tables, index.view(rows, S) if norm else index, *caches, *scales]


# --- attention over pages -----------------------------------------------------------------------------------------


def pages(draw, lengths):
    """Different blocks for the contexts of all sequences."""
    return draw.slots(len(lengths) * BLOCKS, len(lengths) * BLOCKS).view(len(lengths), BLOCKS).int()


def in_nz(cache):
    """Pages of FRACTAL_NZ as ATB shapes them."""
    return cache.squeeze(2).unflatten(-1, (-1, 16)).transpose(1, 2).contiguous()
