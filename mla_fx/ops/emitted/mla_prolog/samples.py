"""Calls of mla_prolog: every cache mode and rope layout, quantised or not."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Sample
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.mla_prolog_v3 import samples as samples_v3

from .check import RESERVED_BUT_READ

RESCALED: dict[str, Any] = {"qc_qr_scale": 0.75, "kc_scale": 1.25}


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
) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    _, args, kwargs = samples_v3.sample(*call, **options)
    rest = {name: value for name, value in kwargs.items() if name in ("cache_mode", *RESERVED_BUT_READ)}
    return Sample(mode, (*args[:9], kwargs["cache_index"], *args[9:]), rest)
