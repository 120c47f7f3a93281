"""multi_latent_attention as ATB's operator; in graphs of GE, which know none, as FusedInferAttentionScore.

ATB leaves rows of sequences without a context undefined; `mla_fx.multi_latent_attention` makes them zeros."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.paged import TILE
from mla_fx.ops.common.stays import Stays, unless
from mla_fx.ops.vendor.multi_latent_attention.arguments import (
    DECODE,
    INT8,
    MERGED,
    NZ,
    RING,
    SPEC,
    SPLIT,
    Arguments,
    is_causal,
    modes,
    results,
)
from mla_fx.target import Compiled

from . import limits
from .fused_infer_attention_score import KERNEL, attend_to_pages, latent_refusals
from .surface import A2, A3, Surface

OPERATOR = "multi_latent_attention"
ATB = "MultiLatentAttentionOperation"
NO_CONVERTER = f"torch.ops.atb has no converter to GE, and {KERNEL}, which has one, takes"


def lower(surface: Surface, *args: Any, **kwargs: Any) -> Compiled | Stays:
    a = Arguments(*args, **kwargs)
    if surface.mode == "ge":
        return unless(next(refusals_of_ge(surface, a), None), as_fused_infer_attention_score)
    return unless(next(refusals_of_atb(surface, a), None), as_atb)


# --- what the kernels cannot do -----------------------------------------------------------------------------------


def refusals_of_ge(surface: Surface, a: Arguments) -> Iterator[str]:
    mode = modes(a)
    if mode.calc == RING:
        yield f"calc_type is {mode.calc!r}; {NO_CONVERTER} {DECODE!r} or {SPEC!r}"
    if mode.cache not in (SPLIT, NZ):
        yield f"cache_mode is {mode.cache!r}; {NO_CONVERTER} {SPLIT!r} or {NZ!r}"
    if mode.calc == SPEC and not is_causal(a.q_nope):
        heads = a.q_nope.shape[1]
        yield f"q_nope has {heads} heads; {NO_CONVERTER} {SPEC!r} with 128 heads alone, where it is causal"
    assert a.q_rope is not None and a.k_rope is not None, "a merged cache was refused"
    caches = [("ctkv", a.ctkv), ("k_rope", a.k_rope)]
    yield from latent_refusals(surface, ("q_nope", a.q_nope), ("q_rope", a.q_rope), caches)


def refusals_of_atb(surface: Surface, a: Arguments) -> Iterator[str]:
    mode = modes(a)
    yield from limits.chip(surface, ATB, (A2, A3))
    if mode.cache == MERGED:
        yield f"cache_mode is {mode.cache!r}; torch.ops.atb takes latents and rotary keys in two caches"
    if mode.cache == INT8 and mode.calc == RING:
        yield f"calc_type is {mode.calc!r}; with cache_mode {mode.cache!r}, torch_npu has lse in the wrong dtype"
    for name in ("context_lens", "q_seqlen"):
        if isinstance(getattr(a, name), Tensor):
            yield f"{name} is a tensor; torch.ops.atb takes a host list, as the overload `host` does"
    if any(limits.known_equal(length, 0) for length in a.context_lens):
        yield f"context_lens is {a.context_lens}; {ATB} leaves the rows of sequences without a context undefined"
    for name in ("q_rope", "k_rope"):
        yield from limits.dtype(name, getattr(a, name), ATB, limits.HALVES)
    for name in ("ctkv", "k_rope"):
        yield from limits.dense(name, getattr(a, name), ATB)


# --- the calls ----------------------------------------------------------------------------------------------------


def as_fused_infer_attention_score(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    a = Arguments(*args, **kwargs)
    latent = pages(a.ctkv)
    out = attend_to_pages(
        a.q_nope,
        latent,
        latent,
        a.block_tables,
        a.context_lens,
        steps=a.q_seqlen,
        query_rope=a.q_rope,
        key_rope=None if a.k_rope is None else pages(a.k_rope),
        softmax_scale=a.qk_scale,
        block_size=TILE,
        num_key_value_heads=1,
    )
    return out, out.new_empty(0)


def pages(cache: Tensor) -> Tensor:
    """[BlockNum, 128, 1, width] without the head, and FRACTAL_NZ [BlockNum, width/16, 128, 16] with it."""
    is_plain = limits.holds(cache.shape[1] == TILE)
    return cache.squeeze(2) if is_plain else cache.unsqueeze(1)


def as_atb(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    a = Arguments(*args, **kwargs)
    assert a.q_rope is not None, "a merged cache was refused"
    mode = modes(a)
    positional = (
        a.q_nope.contiguous(),
        a.q_rope.contiguous(),
        a.ctkv,
        a.k_rope,
        a.block_tables.to(torch.int32).contiguous(),
        a.context_lens,
        a.q_nope.shape[1],
        a.qk_scale,
        1,
    )
    options = {
        "mask": None if a.mask is None else a.mask.contiguous(),
        "qseqlen": a.q_seqlen,
        "qk_descale": a.qk_descale,
        "pv_descale": a.pv_descale,
        "mask_type": mode.mask,
        "calc_type": mode.calc,
        "cache_mode": mode.cache,
    }
    if mode.calc == RING:
        out, lse = torch.ops.atb.npu_multi_head_latent_attention.lse(*positional, True, **options)
        return out, lse
    out = torch.ops.atb.npu_multi_head_latent_attention(*positional, **options)
    return out, out.new_empty(0, dtype=results(a, mode)[1].dtype)
