"""The arithmetic that the vendor's prolog and key side share: products, norms, rotations, and casts to int8."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT32_EPSILON = 2**-23  # C's FLT_EPSILON


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Int8 gives int32, here as float32. Sums of bfloat16 products are float32, and rounded once: so does PyTorch."""
    if x.dtype == torch.int8:
        return (x.double() @ weight.double()).float()  # float64 is exact for sums of that size
    return x @ weight


def dequantised(sums: Tensor, of_tokens: Tensor, of_columns: Tensor) -> Tensor:
    """Two products in float32; the scales of tokens come first."""
    return sums * of_tokens * of_columns


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """In float32, unrounded. The mean is a product with 1/N, and the rest a division by a root."""
    x = x.float()
    mean = (x * x).sum(-1, keepdim=True) * (1 / x.shape[-1])
    return x / (mean + epsilon).sqrt() * gamma.float()


def multiplied(x: Tensor, factor: float) -> Tensor:
    """Multiplies by an attribute, which kernels leave out where it is one."""
    return x if abs(factor - 1) < FLOAT32_EPSILON else x * factor


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In float32, unrounded: neighbouring columns are a pair, and the results are halves. Tables have all columns."""
    x, cos, sin = x.float(), cos.float(), sin.float()
    half = x.shape[-1] // 2
    real, imaginary = x[..., 0::2], x[..., 1::2]
    first = real * cos[..., :half] + imaginary * -sin[..., :half]
    second = imaginary * cos[..., half:] + real * sin[..., half:]
    return torch.cat((first, second), -1)


def to_int8(x: Tensor) -> Tensor:
    """The nearest integers, ties to even, saturated. What is not a number is 0, as in a device's cast to int32."""
    return x.nan_to_num(0, torch.inf, -torch.inf).round().clamp(-128, 127).to(torch.int8)


def to_int8_by_float16(x: Tensor) -> Tensor:
    """Rounded twice, to float16 and to integers, both with ties away from zero: so is the query rounded."""
    bits = x.float().nan_to_num(0, torch.inf, -torch.inf).view(torch.int32)
    dropped = 23 - 10  # bits of mantissas, which come last; half of what is dropped rounds magnitudes up
    half = (bits + (1 << dropped - 1) & -1 << dropped).view(torch.float32)
    nearest = (half.abs() + 0.5).floor() * half.sign()
    return nearest.nan_to_num(0).clamp(-128, 127).to(torch.int8)


def factors(x: Tensor) -> tuple[Tensor, Tensor]:
    """What rows are multiplied by to fill int8, and what their codes are multiplied by later."""
    largest = x.abs().amax(-1, keepdim=True)
    return torch.full_like(largest, 127) / largest, largest / 127
