"""merge_attention: attention over parts of a context, merged by the logarithms of their sums."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fx.ops.common.check import FLOATS, known_to_differ
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.sample import Sampler

MOST_PARTS = 16


@dataclass(frozen=True)
class Arguments:
    outs: list[Tensor]
    lses: list[Tensor]


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """Attention over a context from attention over its parts (torch_npu.npu_attention_update)::

        lse = log(sum(exp(lses)))
        out = sum(exp(lses - lse) * outs)

    outs are 1 to 16 tensors [..., C] of one dtype: bfloat16, float16, float32 or float64. lses are as many, [...] in
    float32, or float64 for float64: the logarithms of the sums that the parts were divided by, of base e. Such parts
    are the results of `attention` with return_lse.

    A part adds nothing to a row whose logarithm is minus infinity; its attention must be finite there, since it is
    multiplied by zero. A row that no part sees is zero, with minus infinity for its logarithm. Sums are in float32, or
    float64 for float64, and out is rounded once.

    Returns out [..., C] in the dtype of outs, and lse [...], in that of lses, both contiguous. Raises ValueError for
    arguments that do not fit. Inference only.
    """
    largest = functools.reduce(torch.maximum, a.lses)
    safe = torch.where(largest == -torch.inf, 0.0, largest)
    weights = [torch.exp(lse - safe) for lse in a.lses]
    total = functools.reduce(torch.add, weights)
    divisor = torch.where(total == 0, 1.0, total)
    parts = [out * (weight / divisor).unsqueeze(-1) for out, weight in zip(a.outs, weights, strict=True)]
    out, lse = functools.reduce(torch.add, parts).to(a.outs[0].dtype), safe + total.log()
    return out.contiguous(), lse.contiguous()


def check(a: Arguments) -> None:
    if not 1 <= len(a.outs) <= MOST_PARTS:
        raise ValueError(f"outs has {len(a.outs)} tensors; it must have 1 to {MOST_PARTS}.")
    if len(a.lses) != len(a.outs):
        raise ValueError(f"lses has {len(a.lses)} tensors; it must have as many as outs, {len(a.outs)}.")
    first = a.outs[0]
    if first.dtype not in FLOATS:
        raise ValueError(f"outs[0] has dtype {first.dtype}; it must be one of {', '.join(map(str, FLOATS))}.")
    if first.dim() == 0:
        raise ValueError("outs[0] has shape []; it must be [..., C].")
    for number, (out, lse) in enumerate(zip(a.outs, a.lses, strict=True)):
        _check_alike(f"outs[{number}]", out, first.dtype, list(first.shape))
        _check_alike(f"lses[{number}]", lse, accumulation_dtype(first.dtype), list(first.shape[:-1]))


def _check_alike(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {dtype}.")
    if tensor.dim() != len(shape) or any(map(known_to_differ, tensor.shape, shape)):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {shape}.")


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return a.outs[0].new_empty(a.outs[0].shape), a.lses[0].new_empty(a.lses[0].shape)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Two parts, many, one, a single row, other strides, rows that some or no part sees."""
    if dtype not in FLOATS:
        return
    draw = Sampler(dtype, 19)

    def parts(count: int, *rows: int) -> tuple[list[Tensor], list[Tensor]]:
        lses = [2 * draw.normal(*rows).to(accumulation_dtype(dtype)) for _ in range(count)]
        return [draw.normal(*rows, 8) for _ in range(count)], lses

    yield Sample("two parts", parts(2, 2, 3, 4), {})
    yield Sample("sixteen parts", parts(16, 2, 3), {})
    yield Sample("one part", parts(1, 3), {})
    yield Sample("one row", parts(3), {})
    outs, lses = parts(2, 3, 4)
    yield Sample("columns first", ([out.permute(1, 0, 2) for out in outs], [lse.mT for lse in lses]), {})
    outs, lses = parts(3, 4, 4)
    for number, lse in enumerate(lses):
        lse[number:3] = -torch.inf
        outs[number][number:3] = 0
    yield Sample("rows that parts do not see", (outs, lses), {})


operator = define("merge_attention", Arguments, body, returns=("out", "lse"), check=check, fake=fake, samples=samples)
