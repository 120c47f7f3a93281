"""rope: a single rotation, if no larger operator contains it."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common import math
from mla_fx.ops.common.check import check_rank, check_tensors
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.sample import Sampler


@dataclass(frozen=True)
class Arguments:
    x: Tensor
    cos: Tensor
    sin: Tensor
    _: KW_ONLY
    rope_layout: str = "interleave_half"


def body(a: Arguments) -> Tensor:
    """Rotates every head of every token by its position (torch_npu.npu_interleave_rope, torch_npu.npu_rotary_mul).

    x is [B, S, N, Dr], cos and sin [B or 1, S, Dr], of one dtype: bfloat16, float16, float32 or float64. With h = Dr/2,
    each pair (x1[i], x2[i]), i < h, becomes `x1[i] cos[i] - x2[i] sin[i]` and `x2[i] cos[h+i] + x1[i] sin[h+i]`, in
    float32, or float64 for float64, rounded once. rope_layout is (layout read)_(layout written), "interleave_half",
    "half_half" or "interleave_interleave": the elements of interleaved pairs are adjacent, those of halves h apart.

    Returns [B, S, N, Dr], contiguous. Raises ValueError for arguments that do not fit. Inference only.
    """
    cos, sin = a.cos.unsqueeze(2), a.sin.unsqueeze(2)
    return math.rope(a.x, cos, sin, a.rope_layout).contiguous()


def check(a: Arguments) -> None:
    check_tensors(vars(a))
    check_rank("x", a.x, "B, S, N, Dr")
    batch, steps, _, width = a.x.shape
    math.check_rope(width, a.rope_layout, "B, S, Dr", (batch, steps, width), cos=a.cos, sin=a.sin)


def fake(a: Arguments) -> Tensor:
    return a.x.new_empty(a.x.shape)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every layout, tables per sequence and one for all, a strided x."""
    for seed, layout in enumerate(math.ROPE_LAYOUTS):
        yield Sample(layout, sample(dtype, seed, 2), {"rope_layout": layout})
        yield Sample(f"{layout}, tables for all", sample(dtype, seed, 1), {"rope_layout": layout})
    x, cos, sin = sample(dtype, 3, 2)
    yield Sample("heads first", (x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin), {})


def sample(dtype: torch.dtype, seed: int, tables: int) -> tuple[Any, ...]:
    draw = Sampler(dtype, 20 + seed)
    return draw.normal(2, 3, 4, 8), *draw.tables(tables, 3, 8)


operator = define("rope", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)
