"""few_coded_rows: a few rows times a large weight that is stored as codes of 8 bits.

    rows [M, K] @ ((codes [K, N] - zeros) * scales)        or B of each

Scales and zeros are [1 or B, K', N'], each for a tile of the weight. Letters are those of few_rows.py. Numbers of the
weight are rounded to the dtype of the rows, and are not stored."""

import struct
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean
from mla_fx.target import Compiled

from .few_rows import FOR_ONE_ROW, FOR_SEVERAL, FUNCTIONS, MOST_ROWS, STEP, is_dense, library

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
CALL = struct.Struct("21q")  # `Call` of `Coded` in the C++ file
AS_THEY_ARE, SCALED, SHIFTED = range(3)  # `Kind`
COLUMNS, ROWS, NUMBERS = range(3)  # `Way`


def lower(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Compiled:
    """Lower a product with codes of fixed sizes and strides. Raises NoMatch for others."""
    if codes.device.type != "cpu" or rows.dtype not in FUNCTIONS or codes.dtype not in CODES:
        raise NoMatch("the kernel is for CPUs, rows of 16 bits and codes of 8 bits")
    count = rows.shape[-2]
    least = FOR_ONE_ROW if count == 1 else FOR_SEVERAL
    if codes.numel() < least or (isinstance(count, int) and not 0 < count <= MOST_ROWS):
        raise NoMatch("the kernel is for large weights and few rows")
    if zeros is not None and codes.dtype != torch.int8:
        raise NoMatch("the kernel takes zero points of int8")
    if not (is_dense(codes) or is_dense(codes.mT)) or codes.shape[-2] % STEP != 0:
        raise NoMatch(f"the kernel is for rows of a multiple of {STEP} numbers, and weights that are stored densely")
    length, along = (codes.shape[-2], tile_k) if codes.stride(-2) == 1 else (codes.shape[-1], tile_n)
    if length % STEP != 0 or (along < length and along % STEP != 0):
        raise NoMatch(f"the kernel is for scales that a multiple of {STEP} neighbours share")
    if library() is None:
        raise NoMatch("its C++ kernel was not built")
    return few_coded_rows


def run(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Tensor:
    count = rows.shape[-2]
    if rows.dtype not in FUNCTIONS or library() is None:
        return rows @ numbers(codes, scales, zeros, tile_k, tile_n, rows.dtype)
    tiles = scales, zeros, tile_k, tile_n
    if 0 < count <= MOST_ROWS:
        rows = rows if is_dense(rows) else rows.contiguous()
        out = rows.new_empty((*rows.shape[:-1], codes.shape[-1]))
        rows_m = rows.shape[-1] if count == 1 else rows.stride(-2)
        _call(rows, codes, tiles, out, (count, codes.shape[-1], codes.shape[-2], rows_m), None)
        return out
    is_by_columns = codes.stride(-2) == 1
    lines = codes.mT if is_by_columns else codes
    weight = rows.new_empty(lines.shape)
    _call(rows, codes, tiles, weight, (0, *lines.shape[-2:], 0), NUMBERS)
    return rows @ (weight.mT if is_by_columns else weight)


def _call(rows: Tensor, codes: Tensor, tiles: Any, out: Tensor, sizes: tuple[int, ...], way: int | None) -> None:
    scales, zeros, tile_k, tile_n = tiles
    is_by_columns = codes.stride(-2) == 1
    line, along = (-1, -2) if is_by_columns else (-2, -1)
    kind = AS_THEY_ARE if scales is None and codes.dtype == torch.int8 else SCALED if zeros is None else SHIFTED
    scales = torch.ones(1, 1, 1) if scales is None else scales

    def strides(tensor: Tensor | None) -> tuple[int, ...]:
        if tensor is None:
            return 0, 0, 0, 0
        own = (0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        b, *others = own
        return tensor.data_ptr(), b, others[line], others[along]

    batch, rows_b, codes_b = (1, 0, 0) if codes.dim() == 2 else (codes.shape[0], rows.stride(0), codes.stride(0))
    *counts, rows_m = sizes
    sides = (tile_n, tile_k) if is_by_columns else (tile_k, tile_n)
    weight = codes.data_ptr(), codes_b, codes.stride(line), *strides(scales), *strides(zeros), *sides
    call = CALL.pack(rows.data_ptr(), out.data_ptr(), batch, *counts, rows_b, rows_m, *weight)
    chosen = way if way is not None else COLUMNS if is_by_columns else ROWS
    is_bfloat16 = rows.dtype == torch.bfloat16
    library().few_coded_rows(call, is_bfloat16, CODES.index(codes.dtype), kind, chosen)


def numbers(
    codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int, dtype: torch.dtype
) -> Tensor:
    """The weight that the codes are: [K, N] or [B, K, N]."""
    wide = torch.promote_types(dtype, torch.float32)
    found = codes.to(wide)
    for tiles, step in ((zeros, torch.sub), (scales, torch.mul)):
        if tiles is not None:
            found = step(found, _of_each(tiles.to(wide), codes, tile_k, tile_n))
    return found.to(dtype)


def _of_each(tiles: Tensor, codes: Tensor, tile_k: int, tile_n: int) -> Tensor:
    """The number of each code's tile."""
    for dim, tile in ((-2, tile_k), (-1, tile_n)):
        if tiles.shape[dim] > 1:
            tiles = tiles.repeat_interleave(tile, dim).narrow(dim, 0, codes.shape[dim])
    return tiles if codes.dim() == 3 else tiles.squeeze(0)


def fake(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], codes.shape[-1]))


operator = define_lean("few_coded_rows", run, fake, returns=("out",))


def few_coded_rows(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Tensor:
    product: Tensor = operator(rows, codes, scales, zeros, tile_k, tile_n)
    return product
