"""kv_rmsnorm_rope_cache: the key side of one MLA layer, from the projected latents to the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.common.cache import like_store, of_pages, page_shape, page_slots, store
from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.define import define
from mla_fx.ops.common.math import rescaled, to_accumulation_dtype, wide_rms_norm, wide_rope

from .arguments import Arguments
from .check import CACHES, check
from .samples import samples


def body(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches with this step's latents, and those latents (torch_npu.npu_kv_rmsnorm_rope_cache).

    Without v, a row of kv is the latent followed by the rotary key of MLA::

        c_kv   = RMSNorm(kv[..., :Hckv]) * kc_scale;  k_rope = RoPE(kv[..., Hckv:])
        ckv_cache[index] = c_kv;           k_cache[index] = k_rope

    kv is [B, 1, S, Hckv+Dr]; gamma [Hckv], whose length is Hckv; cos and sin [B or 1, 1, S, Dr], both None
    for a model without rotation; without a rotary part, Dr is 0 and k_cache has no columns. With v, every
    column of a key of N = 1, 2, 4 or 8 heads is normalised, and the first Dr of them, as many as cos and sin have, are
    rotated::

        n      = RMSNorm(kv);              k_rope = [RoPE(n[..., :Dr]), n[..., Dr:]];  c_kv = v

    kv is [B, N, S, Dk], gamma [Dk], v [B, N, S, Dv]; read below Dk for Dr, Dv for Hckv and N for the 1 of a cache.

    RMSNorm(x) is `x / sqrt(mean(x^2) + epsilon) * gamma`. RoPE turns each pair (x1[i], x2[i]), i < h = Dr/2, into
    `x1[i] cos[i] - x2[i] sin[i]` and `x2[i] cos[h+i] + x1[i] sin[h+i]`. rope_layout is (layout read)_(layout written),
    "interleave_half", "half_half" or "interleave_interleave": the elements of interleaved pairs are adjacent, those of
    halves h apart. gamma_after_cast multiplies by gamma after rounding the normalised value, and rounds again, as
    Hugging Face does. kc_scale, LongCat's factor of the latents, is not an argument of the source; with v it must be 1.

    Tensors share the dtype of kv (bfloat16, float16, float32, float64); gamma and tables may be any of these. RMSNorm
    and RoPE run in float32, or float64 for float64, and are rounded once. cos and sin may also have one step for all
    S, with cache_mode "Norm" or "BNSD", and with "PA" or "PA_BNSD" if no cache is int8.

    cache_mode defines the caches [..., Dr] and [..., Hckv] and the int64 index:

    - "Norm": [B, 1, T, *], index [B or 1, S] of positions inside the batch row;
    - "BNSD", not in the source: [B, 1, S, *], index None: the new rows are the new cache;
    - "PA", also called "PA_BNSD": [BlockNum, BlockSize, 1, *], index [B*S] over the BlockNum*BlockSize slots;
    - "PA_NZ": the same shape and index, each page holding the bytes of [1, D/d0, BlockSize, d0] (FRACTAL_NZ), d0
      elements being 32 bytes; d0 divides D;
    - "NZ", not in the source: "PA_NZ" with caches of that shape, [BlockNum, D/d0, BlockSize, d0], and without v;
    - "PA_BLK_BNSD", "PA_BLK_NZ": as "PA" and "PA_NZ", but each batch row fills pages of its own in order, and index
      [B*Ceil(S/BlockSize)] holds the first slot of each (any slot of a page may name it). mla_prolog's modes of these
      names hold block numbers instead. BlockNum is at least B*Ceil(S/BlockSize).

    A negative index stores nothing for its token, or for its page. For a row that the program refuses to write, the
    compiler gives the number of slots, which is refused here, too, or -1 on NPUs. Duplicate slots: which row is stored
    is undefined. BlockSize is a multiple of 16, or of 32 if a cache is int8, except for unquantised "PA" and "PA_BNSD",
    which take any. Only axis 0 of the caches may be strided with NZ or v.

    Each cache may be int8; then its rows are `x * scale (+ offset)`, x being c_kv or k_rope before it was rounded, to
    the nearest integer, ties to even, saturated. rounds_first, which is not an argument of the source either, takes x
    after it was rounded to the dtype of kv, as plain code in 16 bits does. k_rope_scale and k_rope_offset belong to
    k_cache, c_kv_scale and c_kv_offset to ckv_cache: float32 (or float64 with float64) [D] or [1, D], with v [N, D].
    An int8 cache needs its scale, no other cache takes one. An offset needs a scale and v; without v, kernels ignore
    it, and it is refused.

    Returns k_cache, ckv_cache, k_rope [B, 1, S, Dr], c_kv [B, 1, S, Hckv]; the last two, never quantised, are called
    k_embed_out and y_out in the source. In place, `kv_rmsnorm_rope_cache_` writes the caches instead and returns the
    last two. NPUs leave those undefined unless is_output_kv, which kernels ignore in "Norm" and which is refused there
    and in "BNSD"; here they are always right, so it changes nothing. A NaN reaches the row of its own token only,
    and becomes 0 in int8. Raises ValueError for arguments that do not fit; index values are checked on the CPU only,
    unless within `check_values`. Inference only.

    If sources disagree: one cache may be quantised without the other, as kernels can, though the document asks for
    both; offsets are optional with v and refused without, though the document requires them; "Norm" takes int8, which
    the document does not exclude, though kernels reject it; BlockNum is bounded by Ceil, not Floor; caches have the
    shape above in "PA_NZ" too: a last dimension of 32 is how int8 pages are stored, not their shape.
    """
    new = new_rows(a)
    k_cache = write(a.k_cache, new.slots, new.k_rows, a.cache_mode)
    ckv_cache = write(a.ckv_cache, new.slots, new.ckv_rows, a.cache_mode)
    return k_cache, ckv_cache, *as_outputs(new.k_rope, new.c_kv, a.v)


def body_(a: Arguments) -> tuple[Tensor, Tensor]:
    new = new_rows(a)
    write(a.k_cache, new.slots, new.k_rows, a.cache_mode, in_place=True)
    write(a.ckv_cache, new.slots, new.ckv_rows, a.cache_mode, in_place=True)
    return as_outputs(new.k_rope, new.c_kv, a.v)


def as_outputs(k_rope: Tensor, c_kv: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous, and not a view of kv or v (k_rope would be one without rotation, c_kv with v)."""
    k_rope = k_rope.clone(memory_format=torch.contiguous_format)
    return k_rope, c_kv.contiguous() if v is None else c_kv.clone(memory_format=torch.contiguous_format)


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
    return wide_rms_norm(x, a.gamma, a.epsilon, a.gamma_after_cast)


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


def fake(a: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pages = of_pages(a, *CACHES, form=page_shape) if a.cache_mode == "NZ" else a
    k_rope = a.kv.new_empty(*a.kv.shape[:3], pages.k_cache.shape[-1])
    c_kv = a.kv.new_empty(*a.kv.shape[:3], pages.ckv_cache.shape[-1])
    k_cache, ckv_cache = (like_store(cache, a.index) for cache in (a.k_cache, a.ckv_cache))
    return k_cache, ckv_cache, k_rope, c_kv


operator = define(
    "kv_rmsnorm_rope_cache",
    Arguments,
    body,
    returns=("k_cache", "ckv_cache", "k_rope", "c_kv"),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"k_cache": "k_cache", "ckv_cache": "ckv_cache"},
)
