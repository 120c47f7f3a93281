"""The roundings of the vendor's kernels: int8 casts, dynamic quantisation, exact integer products.

NaN becomes 0 in every int8 cast, and infinities saturate. A row of zeros needs no guard: its factor 127 / 0 is inf and
inf * 0 is NaN, so the row is stored as zeros with scale 0, which is correct.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def i8_trunc(x: Tensor) -> Tensor:
    """Cast to int8 via int32 (half to even) and a truncating float16 cast: the nearest integer, saturated."""
    return _saturate(x.round())


def i8_half_round(x: Tensor) -> Tensor:
    """Cast to float16, then to int8, both with ties away from zero. The double rounding can change a value by 1."""
    half = float16_half_away(x)
    return _saturate((half.abs() + 0.5).floor().copysign(half))


def i8_half_rint(x: Tensor) -> Tensor:
    """Cast to float16, then to int8, both with ties to even."""
    return _saturate(x.to(torch.float16).float().round())


def float16_half_away(x: Tensor) -> Tensor:
    """Round float32 to the nearest float16 value, with ties away from zero; the result is float32."""
    x = x.float()
    _, exponent = torch.frexp(x)
    # float16 has 11 significant bits, and no finer step than 2^-24.
    step = torch.ldexp(torch.ones_like(x), (exponent - 11).clamp(min=-24))
    steps = x.abs() / step
    below = steps.floor()
    # Adding 0.5 instead would round up the last float32 value before 0.5.
    rounded = ((below + (steps - below >= 0.5)) * step).copysign(x)
    rounded = torch.where(rounded.abs() > torch.finfo(torch.float16).max, rounded.sign() * torch.inf, rounded)
    return torch.where(x.isfinite(), rounded, x)


def quantize_rows(
    x: Tensor, inverse_first: bool, to_int8: Callable[[Tensor], Tensor] = i8_trunc
) -> tuple[Tensor, Tensor]:
    """Quantise symmetrically to int8 over the last axis, with the float32 scale [..., 1] such that `int8 * scale` is
    about `x`.

    With `inverse_first`, the scale is the reciprocal of the factor 127 / max|x|; otherwise it is max|x| / 127.
    """
    largest = x.abs().amax(-1, keepdim=True)
    # Tensors, because PyTorch rounds once too often when it divides a number by a tensor, and on CUDA a tensor by a
    # number.
    limit = torch.full_like(largest, 127.0)
    factor = limit / largest
    return to_int8(x * factor), 1.0 / factor if inverse_first else largest / limit


def int_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the exact integer product of two int8 matrices, rounded once to float32, like an int32.

    float64 holds every sum of products below 2^53 exactly, on any device.
    """
    return (left.double() @ right.double()).float()


def _saturate(integers: Tensor) -> Tensor:
    return integers.nan_to_num(0.0, torch.inf, -torch.inf).clamp(-128, 127).to(torch.int8)
