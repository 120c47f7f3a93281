"""Calls of kv_rmsnorm_rope_cache: every cache mode, with and without v and quantisation."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.common.cache import as_nz
from mla_fx.ops.common.define import Given, Sample
from mla_fx.ops.common.sample import Sampler


class Sizes(NamedTuple):
    """Widths of latents and of rotary keys, pages and their slots, and positions of a "Norm" cache."""

    rank: int
    rope: int
    blocks: int
    block_size: int
    room: int


SMALL = Sizes(rank=16, rope=4, blocks=4, block_size=4, room=16)
WIDE = Sizes(rank=64, rope=32, blocks=5, block_size=32, room=32)  # suit every format, int8 and v


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without rotation, skipped tokens, quantisation and v."""
    yield Sample("Norm", *sample(dtype, 0, "Norm", 3, SMALL))
    halves: dict[str, Any] = {"rope_layout": "half_half", "kc_scale": 1.25}
    yield Sample("Norm", *sample(dtype, 1, "Norm", 1, SMALL, skip=1, gamma_after_cast=True, **halves))
    yield Sample("Norm", *sample(dtype, 2, "Norm", 3, SMALL, shared=True, rope_layout="interleave_interleave"))
    yield Sample("BNSD", *sample(dtype, 19, "BNSD", 3, SMALL, rope_layout="half_half"))
    yield Sample("PA", *sample(dtype, 3, "PA", 3, SMALL, skip=2, is_output_kv=True))
    for seed, mode in enumerate(("Norm", "BNSD", "PA")):
        yield Sample(mode, *sample(dtype, 22 + seed, mode, 3, SMALL, rotate=False, width=0, kc_scale=1.25))
    yield Sample("PA_BNSD", *sample(dtype, 4, "PA_BNSD", 3, SMALL, rotate=False, epsilon=0.1))
    yield Sample("PA_NZ", *sample(dtype, 5, "PA_NZ", 5, skip=2))
    yield Sample("NZ", *in_fractals(*sample(dtype, 28, "PA_NZ", 5, skip=2, rope_layout="half_half")))
    yield Sample("PA_BLK_BNSD", *sample(dtype, 6, "PA_BLK_BNSD", 33, skip=1, is_output_kv=True))
    yield Sample("PA_BLK_NZ", *sample(dtype, 7, "PA_BLK_NZ", 32, rope_layout="half_half", gamma_after_cast=True))
    yield Sample("PA, int8", *sample(dtype, 8, "PA", 5, quantize=("k_rope", "c_kv"), skip=1))
    yield Sample("PA_BNSD, int8", *sample(dtype, 9, "PA_BNSD", 5, quantize=("c_kv",), kc_scale=0.75))
    yield Sample("PA_NZ, int8", *sample(dtype, 10, "PA_NZ", 5, quantize=("k_rope", "c_kv")))
    yield Sample(
        "PA_BLK_BNSD, int8", *sample(dtype, 11, "PA_BLK_BNSD", 33, quantize=("k_rope",), gamma_after_cast=True)
    )
    yield Sample("PA_BLK_NZ, int8", *sample(dtype, 12, "PA_BLK_NZ", 40, quantize=("c_kv",), rotate=False, skip=1))
    yield Sample("Norm, int8", *sample(dtype, 25, "Norm", 5, quantize=("k_rope", "c_kv"), rounds_first=True))
    yield Sample("BNSD, int8", *sample(dtype, 26, "BNSD", 5, quantize=("c_kv",), gamma_after_cast=True))
    yield Sample("Norm, v", *sample(dtype, 13, "Norm", 5, heads=4, skip=3))
    yield Sample("PA, v", *sample(dtype, 14, "PA", 5, heads=2, skip=1, rope_layout="interleave_interleave"))
    yield Sample("PA_NZ, v", *sample(dtype, 15, "PA_NZ", 5, heads=2))
    yield Sample("PA_BLK_BNSD, v", *sample(dtype, 16, "PA_BLK_BNSD", 33, heads=1, rotate=False))
    yield Sample("PA_BLK_NZ, v", *sample(dtype, 17, "PA_BLK_NZ", 33, heads=8, skip=1, gamma_after_cast=True))
    yield Sample("Norm, v, int8", *sample(dtype, 27, "Norm", 5, heads=2, quantize=("k_rope",), rounds_first=True))
    yield Sample("PA, v, int8", *sample(dtype, 18, "PA", 5, heads=2, quantize=("k_rope",), offset=True))
    yield Sample(
        "PA_NZ, v, int8", *sample(dtype, 19, "PA_NZ", 5, heads=2, quantize=("k_rope", "c_kv"), offset=True)
    )
    yield Sample("PA_BLK_BNSD, v, int8", *sample(dtype, 20, "PA_BLK_BNSD", 33, heads=2, quantize=("c_kv",)))
    yield Sample(
        "PA_BLK_NZ, v, int8", *sample(dtype, 21, "PA_BLK_NZ", 33, heads=4, quantize=("k_rope", "c_kv"), skip=1)
    )


def in_fractals(args: tuple[Any, ...], options: dict[str, Any]) -> Given:
    """A call in cache_mode "PA_NZ" as one in "NZ"."""
    return (*args[:5], *map(as_nz, args[5:7]), *args[7:]), options | {"cache_mode": "NZ"}


def sample(
    dtype: torch.dtype,
    seed: int,
    cache_mode: str,
    steps: int,
    sizes: Sizes = WIDE,
    *,
    skip: int = 0,
    shared: bool = False,
    rotate: bool = True,
    width: int | None = None,
    heads: int = 0,
    quantize: tuple[str, ...] = (),
    offset: bool = False,
    **options: Any,
) -> Given:
    """`shared` gives one row of positions and tables for the whole batch; `width` is Dr; `heads` counts those of v (0
    without v); `quantize` names the int8 rows."""
    batch, blocks, block_size = 2, sizes.blocks, sizes.block_size
    rows, rope = 1 if shared else batch, sizes.rope if width is None else width
    k_width, ckv_width = (64, 32) if heads else (rope, sizes.rank)
    total = k_width if heads else k_width + ckv_width
    draw, draw_scale = Sampler(dtype, seed), Sampler(torch.float32, seed)
    room = {"Norm": sizes.room, "BNSD": steps}.get(cache_mode)
    lead = (blocks, block_size, max(heads, 1)) if room is None else (batch, max(heads, 1), room)

    def cache(row: str, width: int) -> Tensor:
        values = draw.normal(*lead, width)
        return (30 * values).clamp(-128, 127).to(torch.int8) if row in quantize else values

    def columns(row: str, width: int, size: float, wanted: bool) -> Tensor | None:
        if row not in quantize or not wanted:
            return None
        drawn = size * draw_scale.gamma(max(heads, 1) * width)
        return drawn.view(heads, width) if heads else drawn

    index = None
    if cache_mode == "Norm":
        index = draw.slots(rows * steps, sizes.room, skip).view(rows, steps)
    elif "BLK" in cache_mode:
        pages = draw.slots(batch * -(-steps // block_size), blocks, skip)
        index = torch.where(pages < 0, pages, pages * block_size)
    elif cache_mode != "BNSD":
        index = draw.slots(batch * steps, blocks * block_size, skip)
    cos, sin = draw.tables(rows, 1, steps, rope) if rotate else (None, None)
    arguments = (
        draw.normal(batch, max(heads, 1), steps, total),
        draw.gamma(k_width if heads else ckv_width),
        cos,
        sin,
        index,
        cache("k_rope", k_width),
        cache("c_kv", ckv_width),
    )
    others = (
        columns("k_rope", k_width, 40, True),
        columns("c_kv", ckv_width, 40, True),
        columns("k_rope", k_width, 7, offset),
        columns("c_kv", ckv_width, 7, offset),
        draw.normal(batch, heads, steps, ckv_width) if heads else None,
    )
    return (*arguments, *(others if heads or quantize else ())), {"cache_mode": cache_mode, **options}
