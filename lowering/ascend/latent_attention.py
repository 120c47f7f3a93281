"""latent_attention as FusedInferAttentionScore over pages: queries [B,S,N,512] and [B,S,N,64], one key head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.emitted.latent_attention import Arguments

from . import fused_infer_attention_score as kernel
from . import limits
from .fused_infer_attention_score import EXPANDED, KERNEL, LATENT_TOKENS, RANK
from .mla_prolog import page_size
from .surface import Surface

OPERATOR = "latent_attention"
PAGE = 128  # tokens of a page, where the cache leaves the choice


def lower(surface: Surface, *args: Any, **kwargs: Any) -> Callable[..., Any] | str:
    return next(refusals(surface, Arguments(*args, **kwargs)), "") or plain


def refusals(surface: Surface, a: Arguments) -> Iterator[str]:
    if a.query_rope is None or a.kr_cache is None:
        yield f"query_rope is None; {KERNEL} takes absorbed queries with a rotary part"
        return
    if a.sinks is not None:
        yield f"sinks are given; {KERNEL} takes them for values of up to {EXPANDED} columns, not for latents of {RANK}"
    caches = [("kv_cache", a.kv_cache), ("kr_cache", a.kr_cache)]
    yield from kernel.latent_refusals(surface, ("query", a.query), ("query_rope", a.query_rope), caches)
    tokens = a.query.shape[1]
    if not any(limits.known_equal(tokens, count) for count in range(1, LATENT_TOKENS + 1)):
        yield f"query has S = {tokens}; {KERNEL} takes 1 to {LATENT_TOKENS} tokens with absorbed queries"
    yield from kernel.mask_refusals(surface, a, tokens)


def plain(*args: Any, **kwargs: Any) -> Tensor:
    """[B,S,N,512]."""
    a = Arguments(*args, **kwargs)
    assert a.query_rope is not None and a.kr_cache is not None, "others are refused"
    batch, positions, _ = a.kv_cache.shape
    size = page_size(positions) or PAGE
    latents, keys = (in_whole_pages(cache, size) for cache in (a.kv_cache, a.kr_cache))
    pages = latents.shape[1] // size
    device = a.kv_cache.device
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    tokens = a.query.shape[1]
    visible = tokens if a.is_causal else positions
    lengths = kernel.lengths(a)
    return kernel.attend(
        a.query.contiguous(),
        *(latents.reshape(-1, size, latents.shape[2]),) * 2,
        query_rope=a.query_rope.contiguous(),
        key_rope=keys.reshape(-1, size, keys.shape[2]),
        actual_seq_kvlen=kernel.equal(batch, visible, device) if lengths is None else lengths.expand(batch),
        block_table=table,
        block_size=size,
        num_query_heads=a.query.shape[2],
        num_key_value_heads=1,
        softmax_scale=a.scale,
        input_layout="BSND",
        **kernel.rows(tokens, device),
    )


def in_whole_pages(cache: Tensor, size: int) -> Tensor:
    """[B,T,D] with T a multiple of the page size. One that grows by a token a step is copied at each step anyway."""
    if page_size(cache.shape[1]) == size:
        return cache
    batch, positions, width = cache.shape
    missing = (size - positions % size) % size  # of positive numbers only: GE keeps the sign where Python does not
    return torch.cat((cache, cache.new_zeros(batch, missing, width)), 1)
