"""Caches of codes: numbers that are kept in 8 bits with scales, and computed where attention reads them."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.common.check import check_dtype, check_rank, check_tensors, known_to_differ
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import Arguments

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = {"kv_cache": "kv_scales", "kr_cache": "kr_scales"}


def numbers(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Codes [..., columns] times scales [..., C], each of columns / C neighbours, rounded once; without scales, the
    numbers themselves."""
    if scales is None:
        return codes
    wide = accumulation_dtype(dtype)
    tiles = codes.to(wide).view(*codes.shape[:-1], scales.shape[-1], codes.shape[-1] // scales.shape[-1])
    return (tiles * scales.to(wide).unsqueeze(-1)).flatten(-2).to(dtype)


def dtype_of(a: Arguments) -> torch.dtype:
    """The dtype of the numbers in a call's caches."""
    return (a.kv_cache if a.kv_scales is None else a.query).dtype


def kind_of(codes: Tensor) -> int:
    """Which of CODES these are, counted from one, for kernels."""
    return 1 + CODES.index(codes.dtype)


def of_rows(scales: Tensor | None, cache: Tensor) -> Tensor | None:
    """Scales of each row of a cache, [B, T, C] or [BlockNum, BlockSize, C]."""
    return None if scales is None else scales.expand(*cache.shape[:2], scales.shape[2])


def dequantised(a: Arguments) -> Arguments:
    """Replace the codes of contexts in one piece by numbers."""
    if a.kv_scales is None:
        return a
    dtype = dtype_of(a)
    kr_cache = None if a.kr_cache is None else numbers(a.kr_cache, a.kr_scales, dtype)
    kv_cache = numbers(a.kv_cache, a.kv_scales, dtype)
    return replace(a, kv_cache=kv_cache, kr_cache=kr_cache, kv_scales=None, kr_scales=None)


def check_latents(a: Arguments, *skip: str) -> None:
    """Check devices and dtypes, but those of `skip`. Caches that have scales are codes in 8 bits."""
    coded = (name for name, scales in SCALES.items() if getattr(a, scales) is not None)
    check_tensors(vars(a), free=("sinks", *SCALES.values()), skip=(*skip, *coded))
    for name, scales in SCALES.items():
        if getattr(a, scales) is not None:
            _check_scales(name, getattr(a, name), scales, getattr(a, scales))
    if a.kr_scales is None or a.kr_cache is None:
        return
    if a.kv_scales is None:
        raise ValueError("kr_scales are given; they must be None without kv_scales.")
    if a.kr_cache.dtype != a.kv_cache.dtype:
        raise ValueError(f"kr_cache has dtype {a.kr_cache.dtype}; it must be {a.kv_cache.dtype}, that of kv_cache.")


def _check_scales(name: str, cache: Tensor | None, scales: str, given: Tensor) -> None:
    if cache is None:
        raise ValueError(f"{scales} are given; they must be None without {name}.")
    check_dtype(name, cache, CODES if given.dtype != torch.float64 else (*CODES, torch.float64))
    check_rank(name, cache, "B, T, columns or BlockNum, BlockSize, columns")
    check_rank(scales, given, "B, T, C or BlockNum, BlockSize, C")
    rows, columns = cache.shape[:2], cache.shape[2]
    sizes = zip(given.shape, rows, strict=False)
    is_wrong = any(known_to_differ(own, 1) and known_to_differ(own, size) for own, size in sizes)
    if is_wrong or given.shape[2] == 0 or statically_known_true(columns % given.shape[2] != 0):
        wanted = f"[{rows[0]} or 1, {rows[1]} or 1, a divisor of {columns}]"
        raise ValueError(f"{scales} has shape {list(given.shape)}; it must be {wanted}, for {name}.")
