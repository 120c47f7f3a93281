"""Calls of mla_prolog and of mla_prolog_v3: every cache mode, rope layout and combination of quantisations."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Given, Sample
from mla_fx.ops.common.sample import Sampler

from .arguments import TILE
from .check import RESERVED_BUT_READ

BLOCK_SIZE, BLOCKS = 16, 4
STEP = 1 / 40  # the value of an int8 step, if values have a standard deviation of 1
RESCALED: dict[str, Any] = {"qc_qr_scale": 0.75, "kc_scale": 1.25}


def samples_v3(dtype: torch.dtype) -> Iterator[Sample]:
    """kv_cache_quant_mode 3 stores 16-bit values, so its samples are 16-bit."""
    normed = {"query_norm_flag": True}
    calls = [
        sample_v3(dtype, 0, 0, "PA_BSND", (2, 3), skip=1, options=normed),
        sample_v3(dtype, 0, 0, "PA_NZ", (5,), skip=2),
        sample_v3(dtype, 0, 0, "PA_BLK_BSND", (2, 20), options={"rmsnorm_epsilon_cq": 0.1}),
        sample_v3(dtype, 0, 0, "PA_BLK_NZ", (20,), lengths=(3, 0, 17)),
        sample_v3(dtype, 0, 0, "BSND", (2, 3), options=RESCALED | normed),
        sample_v3(dtype, 0, 0, "TND", (4,), options={"rmsnorm_epsilon_ckv": 0.1}),
        sample_v3(dtype, 1, 0, "PA_BSND", (5,), smooth=True, options=RESCALED | normed),
        sample_v3(dtype, 1, 0, "PA_BLK_NZ", (2, 20), skip=1),
        sample_v3(dtype, 1, 2, "PA_BSND", (2, 3), options=normed),
        sample_v3(dtype, 1, 2, "PA_NZ", (2, 3), skip=2, options=RESCALED),
        sample_v3(dtype, 1, 2, "PA_BLK_BSND", (20,), skip=1, lengths=(17, 3)),
        sample_v3(dtype, 1, 2, "BSND", (2, 3), smooth=True),
        sample_v3(dtype, 2, 0, "PA_NZ", (2, 3), options=RESCALED),
        sample_v3(dtype, 2, 0, "TND", (4,), smooth=True, options=normed),
        sample_v3(dtype, 2, 1, "PA_BSND", (2, 3), smooth=True, options=RESCALED | normed),
        sample_v3(dtype, 2, 1, "PA_NZ", (5,), skip=1),
        sample_v3(dtype, 2, 1, "PA_BLK_BSND", (2, 20)),
        sample_v3(dtype, 2, 1, "PA_BLK_NZ", (20,), lengths=(16, 4)),
        sample_v3(dtype, 2, 1, "BSND", (2, 3), options=normed),
        sample_v3(dtype, 0, 0, "Norm", (2, 3), options={"rope_layout": "half_half"}),
        sample_v3(dtype, 1, 0, "Norm", (2, 3), skip=1, options=normed | {"gamma_after_cast": True}),
        sample_v3(dtype, 2, 0, "Norm", (2, 3), options={"rope_layout": "interleave_interleave"}),
    ]
    if dtype.itemsize == 2:
        calls += [
            sample_v3(dtype, 1, 3, "PA_BSND", (2, 3), skip=1, smooth=True, options=RESCALED),
            sample_v3(dtype, 1, 3, "TND", (4,)),
            sample_v3(dtype, 2, 3, "PA_BSND", (5,), options=normed),
            sample_v3(dtype, 2, 3, "BSND", (2, 3)),
            sample_v3(dtype, 1, 3, "Norm", (2, 3), skip=1),
        ]
    yield from calls


def sample_v3(
    dtype: torch.dtype,
    weight_quant_mode: int,
    kv_cache_quant_mode: int,
    cache_mode: str,
    tokens: tuple[int, ...],
    *,
    skip: int = 0,
    smooth: bool = False,
    lengths: Sequence[int] | None = None,
    blocks: int = BLOCKS,
    options: dict[str, Any] | None = None,
) -> Sample:
    """`skip` tokens or blocks have no slot; `lengths` are those of the sequences among tokens [T]."""
    packed = kv_cache_quant_mode == 3
    hidden, query_rank, heads, nope, rank, width = 40, 24, 3, 8, (2 * TILE if packed else 64), (8 if packed else 32)
    columns = heads * (nope + width)
    draw = Sampler(dtype)
    some, full = weight_quant_mode > 0, weight_quant_mode == 2
    quantized = {0: (), 1: ("kv_cache",), 2: ("kv_cache", "kr_cache"), 3: ("kv_cache",)}[kv_cache_quant_mode]

    def weight(rows: int, width: int, int8: bool) -> Tensor:
        return integers(draw, rows, width) if int8 else draw.weight(rows, width, fan_in=rows)

    def cache(name: str, width: int) -> Tensor:
        paged = (blocks, BLOCK_SIZE, 1) if cache_mode.startswith("PA") else (*tokens, 1)
        lead = (tokens[0], 1, BLOCK_SIZE) if cache_mode == "Norm" else paged
        return integers(draw, *lead, width) if name in quantized else draw.normal(*lead, width)

    args = (
        integers(draw, *tokens, hidden) if full else draw.normal(*tokens, hidden),
        weight(hidden, query_rank, full),
        weight(query_rank, columns, some),
        draw.weight(heads, nope, rank, fan_in=nope),
        weight(hidden, rank + width, full),
        draw.gamma(query_rank),
        draw.gamma(rank),
        *draw.tables(*tokens, width),
        cache("kv_cache", rank + 2 * width + 4 * (rank // TILE) if packed else rank),
        draw.normal(0) if packed else cache("kr_cache", width),
    )
    scales = {
        "dequant_scale_x": scale(draw, math.prod(tokens), STEP).T if full else None,
        "dequant_scale_w_dq": scale(draw, query_rank, STEP * hidden**-0.5) if full else None,
        "dequant_scale_w_uq_qr": scale(draw, columns, STEP * query_rank**-0.5) if some else None,
        "dequant_scale_w_dkv_kr": scale(draw, rank + width, STEP * hidden**-0.5) if full else None,
        "quant_scale_ckv": {1: torch.tensor([35.0]), 2: scale(draw, rank, 35)}.get(kv_cache_quant_mode),
        "quant_scale_ckr": scale(draw, width, 35) if kv_cache_quant_mode == 2 else None,
        "smooth_scales_cq": scale(draw, query_rank, 1) if smooth else None,
        "k_nope_clip_alpha": torch.tensor([0.85]) if packed else None,
    }
    modes = {
        "cache_mode": cache_mode,
        "weight_quant_mode": weight_quant_mode,
        "kv_cache_quant_mode": kv_cache_quant_mode,
        "query_quant_mode": int(kv_cache_quant_mode == 1),
        "ckvkr_repo_mode": int(packed),
        "quant_scale_repo_mode": int(packed),
    }
    slots = {"cache_index": slots_of(draw, blocks, cache_mode, tokens, skip, lengths), "actual_seq_len": ends(lengths)}
    label = f"{cache_mode}, weight_quant_mode {weight_quant_mode}, kv_cache_quant_mode {kv_cache_quant_mode}"
    return Sample(label, args, slots | scales | modes | (options or {}))


def integers(draw: Sampler, *shape: int) -> Tensor:
    return (draw.normal(*shape).float() / STEP).round().clamp(-127, 127).to(torch.int8)


def scale(draw: Sampler, width: int, size: float) -> Tensor:
    """float32 [1, width] of values of about `size`, for any dtype of the draws."""
    return size * draw.gamma(width).float().unsqueeze(0)


def slots_of(
    draw: Sampler, blocks: int, cache_mode: str, tokens: tuple[int, ...], skip: int, lengths: Sequence[int] | None
) -> Tensor | None:
    """Different slots, or blocks, for all tokens but the first `skip`."""
    if cache_mode == "Norm":
        return torch.stack([draw.slots(tokens[1], BLOCK_SIZE, skip) for _ in range(tokens[0])])
    if not cache_mode.startswith("PA"):
        return None
    if "BLK" not in cache_mode:
        return draw.slots(math.prod(tokens), blocks * BLOCK_SIZE, skip).view(tokens)
    if lengths is not None:
        return draw.slots(sum(map(blocks_of, lengths)), blocks, skip)
    batch, steps = tokens
    return draw.slots(batch * blocks_of(steps), blocks, skip).view(batch, blocks_of(steps))


def blocks_of(length: int) -> int:
    return math.ceil(length / BLOCK_SIZE)


def ends(lengths: Sequence[int] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor(lengths).cumsum(0).int()


# --- mla_prolog ------------------------------------------------------------------------------------------------------


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without compression, rotation, skipped tokens and quantisation."""
    yield Sample("PA_BSND", *sample(dtype, 0, "PA_BSND", (2, 3)))
    halves = RESCALED | {"rope_layout": "half_half"}
    yield Sample("PA_BSND", *sample(dtype, 1, "PA_BSND", (5,), skip=2, gamma_after_cast=True, **halves))
    yield Sample("Norm", *sample(dtype, 2, "Norm", (2, 3), compress=False, **halves))
    yield Sample(
        "Norm", *sample(dtype, 3, "Norm", (2, 1), skip=1, rope_layout="interleave_interleave", rmsnorm_epsilon_cq=0.1)
    )
    yield Sample("BSND", *sample(dtype, 4, "BSND", (2, 3), rmsnorm_epsilon_ckv=0.1, **RESCALED))
    args, kwargs = sample(dtype, 5, "TND", (4,))
    yield Sample("TND", (*args[:7], None, None, *args[9:]), kwargs)
    for seed, (mode, tokens) in enumerate((("PA_BSND", (2, 3)), ("Norm", (2, 3)), ("BSND", (2, 3)), ("TND", (4,)))):
        yield Sample(mode, *sample(dtype, 6 + seed, mode, tokens, skip=seed % 2, width=0))
    yield Sample("NZ", *sample(dtype, 10, "NZ", (2, 3), skip=1, width=16, rope_layout="half_half"))
    yield quantized_sample("PA_NZ", dtype, 0, 0, "PA_NZ", (5,), skip=1)
    yield quantized_sample("PA_BSND, int8 weight_uq_qr", dtype, 1, 0, "PA_BSND", (2, 3), smooth=True)
    yield quantized_sample("TND, int8 weight_uq_qr", dtype, 1, 0, "TND", (4,))
    yield quantized_sample("PA_BSND, int8 caches", dtype, 1, 2, "PA_BSND", (5,), skip=2)
    yield quantized_sample("PA_NZ, int8 caches", dtype, 1, 2, "PA_NZ", (2, 3), smooth=True)
    yield quantized_sample("BSND, int8 caches", dtype, 1, 2, "BSND", (2, 3))


def sample(
    dtype: torch.dtype,
    seed: int,
    mode: str,
    tokens: tuple[int, ...],
    *,
    skip: int = 0,
    compress: bool = True,
    width: int = 4,
    **rest: Any,
) -> Given:
    """`width` is Dr; without columns there are no tables."""
    hidden, heads, nope, rank, room = 32, 3, 8, 16, 16
    query_rank = 24 if compress else hidden
    draw = Sampler(dtype, seed)
    index = draw.slots(torch.Size(tokens).numel(), room, skip)
    lead = {"PA_BSND": (room // 4, 4, 1), "Norm": (tokens[0], 1, room)}.get(mode, (*tokens, 1))
    fractal = 32 // dtype.itemsize

    def cache(columns: int) -> Tensor:
        return draw.normal(*((3, columns // fractal, 16, fractal) if mode == "NZ" else (*lead, columns)))

    arguments = (
        draw.normal(*tokens, hidden),
        draw.weight(hidden, query_rank, fan_in=hidden) if compress else None,
        draw.weight(query_rank, heads * (nope + width), fan_in=query_rank),
        draw.weight(heads, nope, rank, fan_in=nope),
        draw.weight(rank + width, hidden, fan_in=hidden).mT,
        draw.gamma(query_rank) if compress else None,
        draw.gamma(rank),
        *(draw.tables(*tokens, width) if width else (None, None)),
        index.view(tokens) if mode in ("PA_BSND", "Norm", "NZ") else None,
        cache(rank),
        cache(width),
    )
    return arguments, {"cache_mode": mode, **rest}


def quantized_sample(mode: str, *call: Any, **options: Any) -> Sample:
    """A sample of v3 as a call of this interface, where dtypes say what modes say in v3."""
    _, args, kwargs = sample_v3(*call, **options)
    rest = {name: value for name, value in kwargs.items() if name in ("cache_mode", *RESERVED_BUT_READ)}
    return Sample(mode, (*args[:9], kwargs["cache_index"], *args[9:]), rest)
