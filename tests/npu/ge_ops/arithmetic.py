"""Elementwise operators, reductions and products."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchair.ge._ge_graph import ge_type_to_torch_type


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """On a device both operands have one dtype: nothing is promoted."""

    def compute(x1: Tensor, x2: Tensor) -> Tensor:
        if x1.dtype != x2.dtype:
            raise ValueError(f"operands are {x1.dtype} and {x2.dtype}; GE operators take one dtype")
        return function(x1, x2)

    return compute


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: function(x)


Add = AddV2 = _binary(torch.add)
Sub = _binary(torch.sub)
Mul = _binary(torch.mul)
Pow = _binary(torch.pow)
Maximum = _binary(torch.maximum)
Minimum = _binary(torch.minimum)
FloorDiv = _binary(lambda x1, x2: torch.div(x1, x2, rounding_mode="floor"))
FloorMod = _binary(torch.remainder)
Mod = _binary(torch.fmod)  # the sign is that of x1, unlike in Python
Less = _binary(operator.lt)
LessEqual = _binary(operator.le)
Greater = _binary(operator.gt)
GreaterEqual = _binary(operator.ge)
Equal = _binary(operator.eq)
NotEqual = _binary(operator.ne)
LogicalAnd = _binary(torch.logical_and)
LogicalOr = _binary(torch.logical_or)
BitwiseAnd = _binary(torch.bitwise_and)
BitwiseOr = _binary(torch.bitwise_or)

Abs = _unary(torch.abs)
Neg = _unary(torch.neg)
Cos = _unary(torch.cos)
Sin = _unary(torch.sin)
Sqrt = _unary(torch.sqrt)
Rsqrt = _unary(torch.rsqrt)
Square = _unary(torch.square)
Reciprocal = _unary(torch.reciprocal)
Sigmoid = _unary(torch.sigmoid)
Relu = _unary(torch.relu)
Floor = _unary(torch.floor)
LogicalNot = _unary(torch.logical_not)
BitwiseNot = Invert = _unary(torch.bitwise_not)


def Round(x: Tensor, decimals: int = 0) -> Tensor:
    """To the nearest, ties to even."""
    return torch.round(x, decimals=decimals)


@_binary
def RealDiv(x1: Tensor, x2: Tensor) -> Tensor:
    """Integers are divided as integers."""
    return torch.div(x1, x2, rounding_mode=None if x1.is_floating_point() else "trunc")


Div = RealDiv


def Exp(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """A base of -1 is e."""
    power = scale * x + shift
    return power.exp() if base == -1 else torch.pow(base, power)


def Log(x: Tensor, base: float, scale: float, shift: float) -> Tensor:
    """A base of -1 is e."""
    natural = (scale * x + shift).log()
    return natural if base == -1 else natural / math.log(base)


def Swish(x: Tensor, scale: float) -> Tensor:
    return x * torch.sigmoid(scale * x) if scale != 1 else torch.nn.functional.silu(x)


def Muls(x: Tensor, value: float) -> Tensor:
    return x * value


def Adds(x: Tensor, value: float) -> Tensor:
    return x + value


def Axpy(x1: Tensor, x2: Tensor, alpha: float) -> Tensor:
    return x1 + alpha * x2


def Sxpy(x1: Tensor, x2: Tensor, alpha: Tensor) -> Tensor:
    return x1 - alpha * x2


def ClipByValueV2(x: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    return x.clamp(clip_value_min, clip_value_max)


def Cast(x: Tensor, dst_type: int) -> Tensor:
    return x.to(ge_type_to_torch_type(dst_type))


def Bitcast(x: Tensor, type: int, keep_dim: bool = False) -> Tensor:
    return x.view(ge_type_to_torch_type(type))


def Complex(real: Tensor, imag: Tensor, Tout: int) -> Tensor:
    return torch.complex(real, imag)


def Real(input: Tensor, Tout: int) -> Tensor:
    return input.real


def Imag(input: Tensor, Tout: int) -> Tensor:
    return input.imag


def ReduceMean(x: Tensor, axes: Tensor, keep_dims: bool, noop_with_empty_axes: bool) -> Tensor:
    return x if noop_with_empty_axes and not axes.numel() else x.mean(axes.flatten().tolist(), keep_dims)


def ReduceSum(x: Tensor, axes: Tensor, keep_dims: bool) -> Tensor:
    return x.sum(axes.flatten().tolist(), keep_dims, dtype=x.dtype)


def ReduceMax(x: Tensor, axes: Tensor, keep_dims: bool) -> Tensor:
    return x.amax(axes.flatten().tolist(), keep_dims)


def ReduceLogSumExp(x: Tensor, axes: Tensor, keep_dims: bool) -> Tensor:
    return x.logsumexp(axes.flatten().tolist(), keep_dims)


def ArgMaxWithValue(x: Tensor, dimension: int, keep_dims: bool) -> tuple[Tensor, Tensor]:
    values, indices = x.max(dimension, keep_dims)
    return indices.int(), values


def ReduceAny(x: Tensor, axes: Tensor, keep_dims: bool) -> Tensor:
    return x.any(axes.flatten().tolist(), keep_dims) if axes.numel() else x


def ReduceAll(x: Tensor, axes: Tensor, keep_dims: bool) -> Tensor:
    return x.all(axes.flatten().tolist(), keep_dims) if axes.numel() else x


def SoftmaxV2(x: Tensor, axes: list[int], half_to_float: bool) -> Tensor:
    (axis,) = axes
    return x.softmax(axis, dtype=torch.float32 if half_to_float else None)


def LpNormV2(x: Tensor, p: float, axes: list[int], keepdim: bool, epsilon: float) -> Tensor:
    return torch.linalg.vector_norm(x, p, axes or None, keepdim).clamp_min(epsilon)


def Cumsum(x: Tensor, axis: Tensor, exclusive: bool, reverse: bool) -> Tensor:
    if exclusive or reverse:
        raise NotImplementedError(f"Cumsum with exclusive {exclusive} and reverse {reverse}; both must be False")
    return x.cumsum(int(axis), dtype=x.dtype)


def _product(x1: Tensor, x2: Tensor, is_transposed1: bool, is_transposed2: bool, bias: Tensor | None) -> Tensor:
    """16-bit operands are accumulated in float32 and rounded once, as torch does on the CPU."""
    product = (x1.mT if is_transposed1 else x1) @ (x2.mT if is_transposed2 else x2)
    return product if bias is None else product + bias


def MatMul(
    x1: Tensor, x2: Tensor, bias: Tensor | None = None, *, transpose_x1: bool, transpose_x2: bool, **_: Any
) -> Tensor:
    return _product(x1, x2, transpose_x1, transpose_x2, bias)


MatMulV2 = MatMulV3 = MatMul


def BatchMatMul(x1: Tensor, x2: Tensor, bias: Tensor | None = None, *, adj_x1: bool, adj_x2: bool, **_: Any) -> Tensor:
    return _product(x1, x2, adj_x1, adj_x2, bias)


BatchMatMulV2 = BatchMatMulV3 = BatchMatMul


def Conv2D(
    x: Tensor,
    filter: Tensor,
    bias: Tensor | None = None,
    *,
    strides: list[int],
    pads: list[int],
    dilations: list[int],
    groups: int,
    data_format: str,
    **_: Any,
) -> Tensor:
    """Pads are [top, bottom, left, right]."""
    if data_format != "NCHW":
        raise NotImplementedError(f"Conv2D with data_format {data_format!r}; it must be 'NCHW'")
    top, bottom, left, right = pads
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    return torch.nn.functional.conv2d(padded, filter, bias, strides[2:], 0, dilations[2:], groups)


def RmsNorm(x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Computed in float32, rounded once."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def LayerNormV4(
    x: Tensor, normalized_shape: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, *, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Computed in float32, rounded once. Mean and rstd are float32 on a device, but on the CPU, where the graph was
    traced, they have the dtype of x."""
    axes = list(range(-normalized_shape.numel(), 0))
    wide = x.float()
    variance, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + epsilon)
    normed = (wide - mean) * rstd
    scaled = normed if gamma is None else normed * gamma.float()
    return (scaled if beta is None else scaled + beta.float()).to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)
