"""The computation of kv_rmsnorm_rope_cache: rows [B, N, S, *] of N heads, slots, writes."""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.common.cache import page_slots, store
from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.math import rescaled, rms_norm, to_accumulation_dtype, wide_rms_norm, wide_rope

from .arguments import Arguments


class NewRows(NamedTuple):
    """What one step stores in `slots` of each cache, or as the cache itself, and its latents before quantisation."""

    slots: Tensor | None
    k_rows: Tensor
    ckv_rows: Tensor
    k_rope: Tensor
    c_kv: Tensor


def new_rows(a: Arguments) -> NewRows:
    if a.v is None:
        rank = a.gamma.shape[0]
        latent, key = rescaled(normed(a.kv[..., :rank], a), a.kc_scale), rotated(a.kv[..., rank:], a)
    else:
        width = 0 if a.cos is None else a.cos.shape[-1]
        whole = normed(a.kv, a)
        latent = to_accumulation_dtype(a.v)
        key = torch.cat((rotated(whole[..., :width], a), whole[..., width:]), -1)
    k_rope, c_kv = key.to(a.kv.dtype), latent.to(a.kv.dtype)
    if a.rounds_first:
        key, latent = to_accumulation_dtype(k_rope), to_accumulation_dtype(c_kv)
    return NewRows(
        token_slots(a),
        k_rope if a.k_rope_scale is None else quantized(key, a.k_rope_scale, a.k_rope_offset),
        c_kv if a.c_kv_scale is None else quantized(latent, a.c_kv_scale, a.c_kv_offset),
        k_rope,
        c_kv,
    )


def normed(x: Tensor, a: Arguments) -> Tensor:
    """RMSNorm in the accumulation dtype."""
    if a.gamma_after_cast:
        return to_accumulation_dtype(rms_norm(x, a.gamma, a.epsilon, True))
    return wide_rms_norm(x, a.gamma, a.epsilon)


def rotated(x: Tensor, a: Arguments) -> Tensor:
    """RoPE in the accumulation dtype."""
    if a.cos is None or a.sin is None:
        return to_accumulation_dtype(x)
    return wide_rope(x, a.cos, a.sin, a.rope_layout)


def token_slots(a: Arguments) -> Tensor | None:
    """The slot of each token; index may hold one slot per page."""
    if a.index is None or "BLK" not in a.cache_mode:
        return a.index
    batch, _, steps, _ = a.kv.shape
    return page_slots(a.index, batch, steps, a.k_cache.shape[1])


def quantized(rows: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """`scale` and `offset` are [D] or [N, D]."""
    scaled = rows * scale.unsqueeze(-2)
    return i8_trunc(scaled if offset is None else scaled + offset.unsqueeze(-2))


def write(cache: Tensor, slots: Tensor | None, rows: Tensor, cache_mode: str, *, in_place: bool = False) -> Tensor:
    """Return the cache with `rows` [B, N, S, D] at `slots`, as a new tensor unless `in_place`."""
    if slots is None:
        return cache.copy_(rows) if in_place else rows.clone(memory_format=torch.contiguous_format)
    if rows.shape[1] == 1:
        return store(cache, slots, rows.squeeze(1), cache_mode, in_place=in_place)
    return store(*as_one_head(cache, slots, rows, cache_mode), cache_mode, in_place=in_place).view(cache.shape)


def as_one_head(cache: Tensor, slots: Tensor, rows: Tensor, cache_mode: str) -> tuple[Tensor, Tensor, Tensor]:
    """The write of N heads as a write of one head.

    Heads are adjacent in a row of a page, and consecutive positions in a "Norm" cache.
    """
    if cache_mode != "Norm":
        blocks, block_size, heads, width = cache.shape
        return cache.view(blocks, block_size, 1, heads * width), slots, rows.transpose(1, 2).flatten(2)
    batch, heads, room, width = cache.shape
    first = torch.arange(heads, device=slots.device).unsqueeze(-1) * room
    slots = slots.unsqueeze(1)
    slots = torch.where(slots < 0, slots, slots + first).flatten(1)
    return cache.view(batch, 1, heads * room, width), slots, rows.flatten(1, 2)
