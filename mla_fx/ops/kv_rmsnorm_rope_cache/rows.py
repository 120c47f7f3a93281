"""What kv_rmsnorm_rope_cache computes and where it puts it: rows [B, N, S, *] of N heads, slots, writes."""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.common.cache import page_slots, store, store_
from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.math import rms_norm, to_accumulation_dtype, wide_rms_norm, wide_rope


class NewRows(NamedTuple):
    """What one step stores in `slots` of each cache, and its latents before quantisation."""

    slots: Tensor
    k_rows: Tensor
    ckv_rows: Tensor
    k_rope: Tensor
    c_kv: Tensor


def new_rows(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor,
    block_size: int,
    k_rope_scale: Tensor | None,
    c_kv_scale: Tensor | None,
    k_rope_offset: Tensor | None,
    c_kv_offset: Tensor | None,
    v: Tensor | None,
    *,
    epsilon: float,
    cache_mode: str,
    rope_layout: str,
    gamma_after_cast: bool,
) -> NewRows:
    """`block_size` matters only where cache_mode says that `index` counts pages."""

    def norm(x: Tensor) -> Tensor:
        if gamma_after_cast:
            return to_accumulation_dtype(rms_norm(x, gamma, epsilon, True))
        return wide_rms_norm(x, gamma, epsilon)

    def rotate(x: Tensor) -> Tensor:
        return to_accumulation_dtype(x) if cos is None or sin is None else wide_rope(x, cos, sin, rope_layout)

    if v is None:
        rank = gamma.shape[0]
        latent, key = norm(kv[..., :rank]), rotate(kv[..., rank:])
    else:
        width = 0 if cos is None else cos.shape[-1]
        key = norm(kv)
        latent, key = to_accumulation_dtype(v), torch.cat((rotate(key[..., :width]), key[..., width:]), -1)
    k_rope, c_kv = key.to(kv.dtype), latent.to(kv.dtype)
    batch, _, steps, _ = kv.shape
    return NewRows(
        page_slots(index, batch, steps, block_size) if "BLK" in cache_mode else index,
        k_rope if k_rope_scale is None else quantized(key, k_rope_scale, k_rope_offset),
        c_kv if c_kv_scale is None else quantized(latent, c_kv_scale, c_kv_offset),
        k_rope,
        c_kv,
    )


def quantized(rows: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """`scale` and `offset` are [D] or [N, D]."""
    scaled = rows * scale.unsqueeze(-2)
    return i8_trunc(scaled if offset is None else scaled + offset.unsqueeze(-2))


def write(cache: Tensor, slots: Tensor, rows: Tensor, cache_mode: str) -> Tensor:
    """The cache with `rows` [B, N, S, D] at `slots`, as a new tensor."""
    if rows.shape[1] == 1:
        return store(cache, slots, rows.squeeze(1), cache_mode)
    return store(*one_head(cache, slots, rows, cache_mode), cache_mode).view(cache.shape)


def write_(cache: Tensor, slots: Tensor, rows: Tensor, cache_mode: str) -> None:
    """As `write`, into the cache itself."""
    if rows.shape[1] == 1:
        store_(cache, slots, rows.squeeze(1), cache_mode)
    else:
        store_(*one_head(cache, slots, rows, cache_mode), cache_mode)


def one_head(cache: Tensor, slots: Tensor, rows: Tensor, cache_mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The same write to the same memory as if to one head: heads follow one another in a page's columns, or in T."""
    if cache_mode != "Norm":
        blocks, block_size, heads, width = cache.shape
        return cache.view(blocks, block_size, 1, heads * width), slots, rows.transpose(1, 2).flatten(2)
    batch, heads, room, width = cache.shape
    first = torch.arange(heads, device=slots.device).unsqueeze(-1) * room
    slots = slots.unsqueeze(1)
    slots = torch.where(slots < 0, slots, slots + first).flatten(1)
    return cache.view(batch, 1, heads * room, width), slots, rows.flatten(1, 2)
