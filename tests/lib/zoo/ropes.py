"""Rotary embedding. Each spelling says which layout it reads, which it writes, and what its tables look like.

`x` and the tables are broadcast against each other when `rotate` is called: the caller has put the head dimension in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Tables = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rope:
    read: str
    written: str
    tables: Callable[[Tensor], Tables]
    rotate: Callable[..., Tensor]


def angles(positions: Tensor, size: int) -> Tensor:
    """[..., size / 2]: the angle of each pair at each position."""
    frequencies = 100.0 ** (-torch.arange(0, size, 2) / size)
    return positions.unsqueeze(-1) * frequencies


# --- tables ----------------------------------------------------------------------------------------------------------


def doubled(angle: Tensor) -> Tables:
    whole = torch.cat((angle, angle), dim=-1)
    return whole.cos(), whole.sin()


def half_size(angle: Tensor) -> Tables:
    return angle.cos(), angle.sin()


def repeated(angle: Tensor) -> Tables:
    whole = angle.repeat_interleave(2, dim=-1)
    return whole.cos(), whole.sin()


def complex_numbers(angle: Tensor) -> Tables:
    return (torch.polar(torch.ones_like(angle), angle),)


# --- rotations -------------------------------------------------------------------------------------------------------


def stride_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers 5, DeepSeek-V3."""
    cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def by_rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos) + (rotate_half(x) * sin)


def view_transpose(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek's remote code, transformers 4."""
    *lead, size = x.shape
    x = x.view(*lead, size // 2, 2).transpose(-1, -2).reshape(*lead, size)
    return (x * cos) + (rotate_half(x) * sin)


def cat_of_strides(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Megatron's multi-latent attention."""
    x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return (x * cos) + (rotate_half(x) * sin)


def complex_product(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """DeepSeek's model.py, DeepSeek-V2."""
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(x * freqs_cis).flatten(-2).to(dtype)


def stack_flatten(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """vLLM's GPT-J style."""
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def rotate_every_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


def chunks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """vLLM's NeoX style."""
    x1, x2 = torch.chunk(x, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def addcmul(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x * cos, rotate_half(x), sin)


def in_float32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x32 = x.float()
    return ((x32 * cos.float()) + (rotate_half(x32) * sin.float())).to(x.dtype)


def slice_assigned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    x1, x2 = x[..., 0::2], x[..., 1::2]
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x2 * cos + x1 * sin
    return out


def not_at_all(x: Tensor, *_: Tensor) -> Tensor:
    """Kimi Linear."""
    return x


ROPES = {
    "stride_two": Rope("interleave", "half", doubled, stride_two),
    "view_transpose": Rope("interleave", "half", doubled, view_transpose),
    "cat_of_strides": Rope("interleave", "half", doubled, cat_of_strides),
    "rotate_half": Rope("half", "half", doubled, by_rotate_half),
    "addcmul": Rope("half", "half", doubled, addcmul),
    "in_float32": Rope("half", "half", doubled, in_float32),
    "chunks": Rope("half", "half", half_size, chunks),
    "complex": Rope("interleave", "interleave", complex_numbers, complex_product),
    "stack_flatten": Rope("interleave", "interleave", half_size, stack_flatten),
    "rotate_every_two": Rope("interleave", "interleave", repeated, rotate_every_two),
    "slice_assigned": Rope("interleave", "interleave", half_size, slice_assigned),
    "none": Rope("none", "none", half_size, not_at_all),
}
