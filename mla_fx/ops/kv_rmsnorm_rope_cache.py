"""kv_rmsnorm_rope_cache: the key side of one MLA layer, from the projected latents to the cache."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._cache import store, store_
from ._check import check_choice, check_index, check_rank, check_shape, check_tensors
from ._math import check_rope, latent_and_key
from ._sample import Sampler
from .define import Sample, define

CACHE_MODES = ("Norm", "PA", "PA_BNSD")


def body(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    rope_layout: str = "interleave_half",
    gamma_after_cast: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The caches with this step's latents, and those latents::

        c_kv   = RMSNorm(kv[..., :Hckv]);  k_rope = RoPE(kv[..., Hckv:])
        ckv_cache[index] = c_kv;           k_cache[index] = k_rope

    kv is [B, 1, S, Hckv+Dr]; gamma [Hckv], whose length says what Hckv is; cos and sin [B or 1, 1, S, Dr], both None
    for a model without rotation. The caches share the dtype of kv (bfloat16, float16, float32, float64); gamma and
    tables may be any of these. RMSNorm runs in float32, or float64 for float64.

    cache_mode says what the caches [..., Dr] and [..., Hckv] and the int64 index are:
    "Norm" [B, 1, T, *], index [B or 1, S] of positions inside the batch row;
    "PA", also called "PA_BNSD", [BlockNum, BlockSize, 1, *], index [B*S] over the BlockNum*BlockSize slots.
    A negative index stores nothing for its token. Equal non-negative indices leave either row.

    rope_layout is (layout read)_(layout written), "interleave_half", "half_half" or "interleave_interleave".
    gamma_after_cast multiplies by gamma after rounding the normalised value, as Hugging Face does.

    Returns k_cache, ckv_cache, k_rope [B, 1, S, Dr], c_kv [B, 1, S, Hckv]; the twin `kv_rmsnorm_rope_cache_` writes the
    caches instead and returns the last two. NPUs leave those two undefined unless is_output_kv; here they are always
    right. Raises ValueError for arguments that do not fit; index values are checked on the CPU only. Inference only.
    """
    c_kv, k_rope = latent_and_key(kv, gamma, cos, sin, epsilon, rope_layout, gamma_after_cast)
    k_cache = store(k_cache, index, k_rope.squeeze(1), cache_mode)
    ckv_cache = store(ckv_cache, index, c_kv.squeeze(1), cache_mode)
    return k_cache, ckv_cache, *as_outputs(k_rope, c_kv)


def body_(
    *, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, cache_mode: str, is_output_kv: bool, **rest: Any
) -> tuple[Tensor, Tensor]:
    c_kv, k_rope = latent_and_key(**rest)
    store_(k_cache, index, k_rope.squeeze(1), cache_mode)
    store_(ckv_cache, index, c_kv.squeeze(1), cache_mode)
    return as_outputs(k_rope, c_kv)


def as_outputs(k_rope: Tensor, c_kv: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous, and k_rope a copy: without rotation it is a view of kv, which an operator may not return."""
    return k_rope.clone(memory_format=torch.contiguous_format), c_kv.contiguous()


def check(**arguments: Any) -> None:
    a = SimpleNamespace(**arguments)
    check_tensors(arguments, free=("gamma", "cos", "sin"), skip="index")
    check_choice("cache_mode", a.cache_mode, CACHE_MODES)
    check_shape("kv", a.kv, "B, 1, S, Hckv+Dr", (None, 1, None, None))
    check_rank("gamma", a.gamma, "Hckv")
    batch, _, steps, total = a.kv.shape
    rank = a.gamma.shape[0]
    width = total - rank
    check_rope(width, a.rope_layout, "B, 1, S, Dr", (batch, 1, steps, width), cos=a.cos, sin=a.sin)
    norm = a.cache_mode == "Norm"
    letters = "B, 1, T" if norm else "BlockNum, BlockSize, 1"
    lead = (batch, 1, None) if norm else (None, None, 1)
    check_shape("k_cache", a.k_cache, f"{letters}, Dr", (*lead, width))
    check_shape("ckv_cache", a.ckv_cache, f"{letters}, Hckv", (*a.k_cache.shape[:-1], rank))
    if norm:
        check_shape("index", a.index, "B, S", (batch, steps), broadcast=True)
    else:
        check_shape("index", a.index, "B*S", (batch * steps,))
    check_index("index", a.index, a.k_cache.shape[2] if norm else a.k_cache.shape[0] * a.k_cache.shape[1])


def fake(*, kv: Tensor, gamma: Tensor, k_cache: Tensor, ckv_cache: Tensor, **_: Any) -> tuple[Tensor, ...]:
    k_rope = kv.new_empty(*kv.shape[:3], k_cache.shape[-1])
    c_kv = kv.new_empty(*kv.shape[:3], gamma.shape[0])
    return torch.empty_like(k_cache), torch.empty_like(ckv_cache), k_rope, c_kv


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without rotation and skipped tokens."""
    yield sample(dtype, 0, "Norm", 3)
    yield sample(dtype, 1, "Norm", 1, skip=1, rope_layout="half_half", gamma_after_cast=True)
    yield sample(dtype, 2, "Norm", 3, shared=True, rope_layout="interleave_interleave")
    yield sample(dtype, 3, "PA", 3, skip=2, is_output_kv=True)
    yield sample(dtype, 4, "PA_BNSD", 3, rotate=False, epsilon=0.1)


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
) -> Sample:
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
