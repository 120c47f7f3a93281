"""rms_norm: a single norm, if no larger operator contains it."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from mla_fx.ops.common import math
from mla_fx.ops.common.check import check_shape, check_tensors
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true


@dataclass(frozen=True)
class Arguments:
    x: Tensor
    gamma: Tensor
    _: KW_ONLY
    epsilon: float
    gamma_after_cast: bool = False


def body(a: Arguments) -> Tensor:
    """RMSNorm over the last axis: `x / sqrt(mean(x^2) + epsilon) * gamma` (torch_npu.npu_rms_norm).

    x is [..., H], gamma [H], of one dtype: bfloat16, float16, float32 or float64. The norm runs in float32, or float64
    for float64, and is rounded once. With gamma_after_cast, the normalised value is rounded, multiplied by gamma and
    rounded again, as in Hugging Face's models.

    Returns [..., H], contiguous. Raises ValueError for arguments that do not fit. Inference only.
    """
    return math.rms_norm(a.x, a.gamma, a.epsilon, a.gamma_after_cast).contiguous()


def check(a: Arguments) -> None:
    check_tensors(vars(a))
    if a.x.dim() == 0 or statically_known_true(a.x.shape[-1] == 0):
        raise ValueError(f"x has shape {list(a.x.shape)}; it must be [..., H] with H of 1 or more.")
    check_shape("gamma", a.gamma, "H", (a.x.shape[-1],))


def fake(a: Arguments) -> Tensor:
    return a.x.new_empty(a.x.shape)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """gamma before and after the rounding, one row and many, a strided x."""
    draw = Sampler(dtype, 11)
    yield Sample("rows", (draw.normal(2, 3, 24), draw.gamma(24)), {"epsilon": 1e-5})
    yield Sample("one row", (draw.normal(24), draw.gamma(24)), {"epsilon": 1e-5})
    after = {"epsilon": 1e-6, "gamma_after_cast": True}
    yield Sample("gamma after the cast", (draw.normal(2, 3, 24), draw.gamma(24)), after)
    yield Sample("part of a row", (draw.normal(2, 3, 30)[..., :24], draw.gamma(24)), {"epsilon": 1e-5})


operator = define("rms_norm", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)
