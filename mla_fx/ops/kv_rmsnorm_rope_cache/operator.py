"""kv_rmsnorm_rope_cache: the key side of one MLA layer, from the projected latents to the cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.sample import Sampler

from .check import check
from .rows import new_rows, write, write_


def body(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    rope_layout: str = "interleave_half",
    gamma_after_cast: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches with this step's latents, and those latents (torch_npu.npu_kv_rmsnorm_rope_cache).

    Without v, the latent and the rotary key of MLA lie side by side::

        c_kv   = RMSNorm(kv[..., :Hckv]);  k_rope = RoPE(kv[..., Hckv:])
        ckv_cache[index] = c_kv;           k_cache[index] = k_rope

    kv is [B, 1, S, Hckv+Dr]; gamma [Hckv], whose length says what Hckv is; cos and sin [B or 1, 1, S, Dr], both None
    for a model without rotation. With v, every column of a key of N = 1, 2, 4 or 8 heads is normalised, and the first
    Dr of them, as many as cos and sin have, are rotated::

        n      = RMSNorm(kv);              k_rope = [RoPE(n[..., :Dr]), n[..., Dr:]];  c_kv = v

    kv is [B, N, S, Dk], gamma [Dk], v [B, N, S, Dv]; read below Dk for Dr, Dv for Hckv and N for the 1 of a cache.

    RMSNorm(x) is `x / sqrt(mean(x^2) + epsilon) * gamma`. RoPE makes of each pair (x1[i], x2[i]), i < h = Dr/2,
    `x1[i] cos[i] - x2[i] sin[i]` and `x2[i] cos[h+i] + x1[i] sin[h+i]`. rope_layout is (layout read)_(layout written),
    "interleave_half", "half_half" or "interleave_interleave": interleaved pairs are neighbours, halves h apart.
    gamma_after_cast multiplies by gamma after rounding the normalised value, and rounds again, as Hugging Face does.

    Tensors share the dtype of kv (bfloat16, float16, float32, float64); gamma and tables may be any of these. RMSNorm
    and RoPE run in float32, or float64 for float64, and are rounded once. cos and sin may also have one step for all
    S, with unquantised caches and cache_mode "Norm", "PA" or "PA_BNSD".

    cache_mode says what the caches [..., Dr] and [..., Hckv] and the int64 index are:

    - "Norm": [B, 1, T, *], index [B or 1, S] of positions inside the batch row;
    - "PA", also called "PA_BNSD": [BlockNum, BlockSize, 1, *], index [B*S] over the BlockNum*BlockSize slots;
    - "PA_NZ": the same shape and index, each page holding the bytes of [1, D/d0, BlockSize, d0] (FRACTAL_NZ), d0
      elements being 32 bytes; d0 divides D;
    - "PA_BLK_BNSD", "PA_BLK_NZ": as "PA" and "PA_NZ", but each batch row fills pages of its own in order, and index
      [B*Ceil(S/BlockSize)] holds the first slot of each (any slot of a page names it). mla_prolog's modes of these
      names hold block numbers instead. BlockNum is at least B*Ceil(S/BlockSize).

    A negative index stores nothing for its token, or for its page. Equal non-negative indices leave either row.
    BlockSize is a multiple of 16, or of 32 if a cache is int8, except for unquantised "PA" and "PA_BNSD", which take
    any. Only axis 0 of the caches may be strided with NZ or v.

    Each cache may be int8, except in "Norm"; then its rows are `x * scale (+ offset)`, x being c_kv or k_rope before
    it was rounded, to the nearest integer, ties to even, saturated. k_rope_scale and k_rope_offset belong to k_cache,
    c_kv_scale and c_kv_offset to ckv_cache: float32 [D] or [1, D], with v [N, D]. An int8 cache needs its scale, no
    other cache takes one, and an offset needs a scale.

    Returns k_cache, ckv_cache, k_rope [B, 1, S, Dr], c_kv [B, 1, S, Hckv]; the last two, never quantised, are called
    k_embed_out and y_out in the source. The twin `kv_rmsnorm_rope_cache_` writes the caches instead and returns the
    last two. NPUs leave those undefined unless is_output_kv; here they are always right, so that it changes nothing.
    A NaN spoils the row of its token only, and is 0 as int8. Raises ValueError for arguments that do not fit; index
    values are checked on the CPU only, unless within `check_values`. Inference only.

    Where sources disagree: one cache may be quantised without the other, as kernels can, though the document asks for
    both; offsets are optional and always added, though the document requires them and kernels ignore them without v;
    "Norm" refuses int8, as kernels do, though the document does not say so; BlockNum is bounded by Ceil, not Floor;
    caches have the shape above in "PA_NZ" too: a last dimension of 32 is how int8 pages are stored, not their shape.
    """
    new = new_rows(
        kv, gamma, cos, sin, index, k_cache.shape[1], k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v,
        epsilon=epsilon, cache_mode=cache_mode, rope_layout=rope_layout, gamma_after_cast=gamma_after_cast,
    )  # fmt: skip
    k_cache = write(k_cache, new.slots, new.k_rows, cache_mode)
    ckv_cache = write(ckv_cache, new.slots, new.ckv_rows, cache_mode)
    return k_cache, ckv_cache, *as_outputs(new.k_rope, new.c_kv, v)


def body_(
    *, k_cache: Tensor, ckv_cache: Tensor, v: Tensor | None, cache_mode: str, is_output_kv: bool, **rest: Any
) -> tuple[Tensor, Tensor]:
    new = new_rows(block_size=k_cache.shape[1], v=v, cache_mode=cache_mode, **rest)
    write_(k_cache, new.slots, new.k_rows, cache_mode)
    write_(ckv_cache, new.slots, new.ckv_rows, cache_mode)
    return as_outputs(new.k_rope, new.c_kv, v)


def as_outputs(k_rope: Tensor, c_kv: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """Contiguous, and no view of kv or v, which k_rope is without rotation and c_kv is with v."""
    k_rope = k_rope.clone(memory_format=torch.contiguous_format)
    return k_rope, c_kv.contiguous() if v is None else c_kv.clone(memory_format=torch.contiguous_format)


def fake(*, kv: Tensor, k_cache: Tensor, ckv_cache: Tensor, **_: Any) -> tuple[Tensor, ...]:
    k_rope = kv.new_empty(*kv.shape[:3], k_cache.shape[-1])
    c_kv = kv.new_empty(*kv.shape[:3], ckv_cache.shape[-1])
    return torch.empty_like(k_cache), torch.empty_like(ckv_cache), k_rope, c_kv


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without rotation, skipped tokens, quantisation and v."""
    yield Sample("Norm", *sample(dtype, 0, "Norm", 3))
    yield Sample("Norm", *sample(dtype, 1, "Norm", 1, skip=1, rope_layout="half_half", gamma_after_cast=True))
    yield Sample("Norm", *sample(dtype, 2, "Norm", 3, shared=True, rope_layout="interleave_interleave"))
    yield Sample("PA", *sample(dtype, 3, "PA", 3, skip=2, is_output_kv=True))
    yield Sample("PA_BNSD", *sample(dtype, 4, "PA_BNSD", 3, rotate=False, epsilon=0.1))
    yield Sample("PA_NZ", *paged(dtype, 5, "PA_NZ", 5, skip=2))
    yield Sample("PA_BLK_BNSD", *paged(dtype, 6, "PA_BLK_BNSD", 33, skip=1, is_output_kv=True))
    yield Sample("PA_BLK_NZ", *paged(dtype, 7, "PA_BLK_NZ", 32, rope_layout="half_half", gamma_after_cast=True))
    yield Sample("PA, int8", *paged(dtype, 8, "PA", 5, quantize=("k_rope", "c_kv"), skip=1))
    yield Sample("PA_BNSD, int8", *paged(dtype, 9, "PA_BNSD", 5, quantize=("c_kv",), offset=True))
    yield Sample("PA_NZ, int8", *paged(dtype, 10, "PA_NZ", 5, quantize=("k_rope", "c_kv"), offset=True))
    yield Sample("PA_BLK_BNSD, int8", *paged(dtype, 11, "PA_BLK_BNSD", 33, quantize=("k_rope",), gamma_after_cast=True))
    yield Sample("PA_BLK_NZ, int8", *paged(dtype, 12, "PA_BLK_NZ", 40, quantize=("c_kv",), rotate=False, skip=1))
    yield Sample("Norm, v", *paged(dtype, 13, "Norm", 5, heads=4, skip=3))
    yield Sample("PA, v", *paged(dtype, 14, "PA", 5, heads=2, skip=1, rope_layout="interleave_interleave"))
    yield Sample("PA_NZ, v", *paged(dtype, 15, "PA_NZ", 5, heads=2))
    yield Sample("PA_BLK_BNSD, v", *paged(dtype, 16, "PA_BLK_BNSD", 33, heads=1, rotate=False))
    yield Sample("PA_BLK_NZ, v", *paged(dtype, 17, "PA_BLK_NZ", 33, heads=8, skip=1, gamma_after_cast=True))
    yield Sample("PA, v, int8", *paged(dtype, 18, "PA", 5, heads=2, quantize=("k_rope",), offset=True))
    yield Sample("PA_NZ, v, int8", *paged(dtype, 19, "PA_NZ", 5, heads=2, quantize=("k_rope", "c_kv"), offset=True))
    yield Sample("PA_BLK_BNSD, v, int8", *paged(dtype, 20, "PA_BLK_BNSD", 33, heads=2, quantize=("c_kv",)))
    yield Sample("PA_BLK_NZ, v, int8", *paged(dtype, 21, "PA_BLK_NZ", 33, heads=4, quantize=("k_rope", "c_kv"), skip=1))


def sample(
    dtype: torch.dtype,
    seed: int,
    cache_mode: str,
    steps: int,
    *,
    skip: int = 0,
    shared: bool = False,
    rotate: bool = True,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`shared` gives one row of positions and one of tables for the whole batch."""
    batch, rank, width, room = 2, 16, 4, 16
    draw = Sampler(dtype, seed)
    rows = 1 if shared else batch
    cos, sin = draw.tables(rows, 1, steps, width) if rotate else (None, None)
    index = draw.slots(rows * steps, room, skip)
    lead = (batch, 1, room) if cache_mode == "Norm" else (room // 4, 4, 1)
    arguments = (
        draw.normal(batch, 1, steps, rank + width),
        draw.gamma(rank),
        cos,
        sin,
        index.view(rows, steps) if cache_mode == "Norm" else index,
        draw.normal(*lead, width),
        draw.normal(*lead, rank),
    )
    return arguments, {"cache_mode": cache_mode, **options}


def paged(
    dtype: torch.dtype,
    seed: int,
    cache_mode: str,
    steps: int,
    *,
    skip: int = 0,
    rotate: bool = True,
    heads: int = 0,
    quantize: tuple[str, ...] = (),
    offset: bool = False,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sizes that suit every format; `heads` counts those of v, 0 being none; `quantize` names the rows of int8."""
    batch, rope, blocks, block_size = 2, 32, 5, 32
    k_width, ckv_width = (64, 32) if heads else (rope, 64)
    total = k_width if heads else k_width + ckv_width
    draw, draw_scale = Sampler(dtype, seed), Sampler(torch.float32, seed)
    lead = (batch, max(heads, 1), block_size) if cache_mode == "Norm" else (blocks, block_size, max(heads, 1))

    def cache(row: str, width: int) -> Tensor:
        held = draw.normal(*lead, width)
        return (30 * held).clamp(-128, 127).to(torch.int8) if row in quantize else held

    def columns(row: str, width: int, size: float, wanted: bool) -> Tensor | None:
        if row not in quantize or not wanted:
            return None
        drawn = size * draw_scale.gamma(max(heads, 1) * width)
        return drawn.view(heads, width) if heads else drawn

    if cache_mode == "Norm":
        index = torch.stack([draw.slots(steps, block_size, skip) for _ in range(batch)])
    elif "BLK" in cache_mode:
        pages = draw.slots(batch * -(-steps // block_size), blocks, skip)
        index = torch.where(pages < 0, pages, pages * block_size)
    else:
        index = draw.slots(batch * steps, blocks * block_size, skip)
    cos, sin = draw.tables(batch, 1, steps, rope) if rotate else (None, None)
    arguments = (
        draw.normal(batch, max(heads, 1), steps, total),
        draw.gamma(k_width if heads else ckv_width),
        cos,
        sin,
        index,
        cache("k_rope", k_width),
        cache("c_kv", ckv_width),
        columns("k_rope", k_width, 40, True),
        columns("c_kv", ckv_width, 40, True),
        columns("k_rope", k_width, 7, offset),
        columns("c_kv", ckv_width, 7, offset),
        draw.normal(batch, heads, steps, ckv_width) if heads else None,
    )
    return arguments, {"cache_mode": cache_mode, **options}


operator = define(
    "kv_rmsnorm_rope_cache",
    body,
    returns=("k_cache", "ckv_cache", "k_rope", "c_kv"),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={"k_cache": "k_cache", "ckv_cache": "ckv_cache"},
)
