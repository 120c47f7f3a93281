"""Caches that hold codes in int8: numbers are (codes + offset) * scale, with one of each for every channel."""

from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import FLOATS, Sizes, check_dtype, check_letters
from mla_fx.ops.common.math import accumulation_dtype


def dequantised(rows: Tensor, scale: Tensor | None, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that rows [..., Hkv, D] of codes stand for, rounded once, to `dtype`. Other rows stay as they are."""
    if rows.dtype != torch.int8:
        return rows
    numbers = rows.to(accumulation_dtype(dtype))
    numbers = numbers if offset is None else numbers + offset
    return (numbers if scale is None else numbers * scale).to(dtype)


def check_channels(a: Any, sizes: Sizes, cache: str, letters: str) -> None:
    """Check what belongs to the codes of `cache`, such as key_scale and key_offset of key_cache."""
    for part in ("scale", "offset"):
        name = cache.replace("cache", part)
        given, stored = getattr(a, name), getattr(a, cache).dtype
        if given is None:
            continue
        if stored != torch.int8:
            raise ValueError(f"{name} is given and {cache} has dtype {stored}; it must be torch.int8.")
        check_dtype(name, given, FLOATS)
        check_letters(a, sizes, **{name: letters})
