"""few_coded_rows: a few rows times a large weight that is stored as codes of 8 bits.

    rows [M, K] @ ((codes [K, N] - zeros) * scales)        or B of each

Scales and zeros are [1 or B, K', N'], each for a tile of the weight. Letters are those of few_rows.py. Numbers of the
weight are rounded to the dtype of the rows, and are not stored."""

import struct

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean
from mla_fx.target import Compiled

from . import wide_products
from .few_rows import FOR_ONE_ROW, FOR_SEVERAL, FUNCTIONS, MOST_ROWS, STEP, are_taken, is_dense, laid_out, library

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
CALL = struct.Struct("21q")  # `Call` of `Coded` in the C++ file
AS_THEY_ARE, SCALED, SHIFTED = range(3)  # `Kind`
COLUMNS, ROWS, NUMBERS = range(3)  # `Way`


def lower(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Compiled:
    """Lower a product with codes of fixed sizes and strides. Raises NoMatch for others."""
    sizes, strides, count = codes.shape, codes.stride(), rows.shape[-2]
    if codes.device.type != "cpu" or rows.dtype not in FUNCTIONS or codes.dtype not in CODES:
        raise NoMatch("the kernel is for CPUs, rows of 16 bits and codes of 8 bits")
    if not all(isinstance(number, int) for number in (*sizes, *strides, tile_k, tile_n)):
        raise NoMatch("the kernel is for weights of fixed sizes")
    least = FOR_ONE_ROW if count == 1 else FOR_SEVERAL
    if codes.numel() < least or not are_taken(rows):
        raise NoMatch("the kernel is for large weights and few rows")
    if zeros is not None and codes.dtype != torch.int8:
        raise NoMatch("the kernel takes zero points of int8")
    if not (is_dense(codes) or is_dense(codes.mT)) or sizes[-2] % STEP != 0:
        raise NoMatch(f"the kernel is for rows of a multiple of {STEP} numbers, and weights that are stored densely")
    length, along = (sizes[-2], tile_k) if strides[-2] == 1 else (sizes[-1], tile_n)
    are_powers = all(tile in (size, 1 << _power(tile)) for tile, size in zip((tile_k, tile_n), sizes[-2:], strict=True))
    if length % STEP != 0 or min(along, length) % STEP != 0 or not are_powers:
        raise NoMatch(f"the kernel is for tiles of a power of two, at least {STEP} neighbours")
    if library() is None:
        raise NoMatch("its C++ kernel was not built")
    return few_coded_rows


def run(
    rows: Tensor, codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile_k: int, tile_n: int
) -> Tensor:
    count = rows.shape[-2]
    if rows.dtype not in FUNCTIONS or library() is None:
        return rows @ numbers(codes, scales, zeros, tile_k, tile_n, rows.dtype)
    is_by_columns = codes.stride(-2) == 1
    coding = _coding(codes, scales, zeros, (tile_n, tile_k) if is_by_columns else (tile_k, tile_n))
    if 0 < count <= MOST_ROWS:
        rows, out, sizes = laid_out(rows, codes.shape[-1])
        _call(COLUMNS if is_by_columns else ROWS, rows, codes, coding, sizes, out)
        return out
    lines = codes.mT if is_by_columns else codes
    weight = rows.new_empty(lines.shape)
    batch = 1 if codes.dim() == 2 else codes.shape[0]
    _call(NUMBERS, rows, codes, coding, (batch, 0, *lines.shape[-2:], 0, 0), weight)
    return wide_products.product(rows, weight.mT if is_by_columns else weight)


def _coding(codes: Tensor, scales: Tensor | None, zeros: Tensor | None, tile: tuple[int, int]) -> tuple[int, ...]:
    """What `Coded` has in the C++ file. A tile is so many lines, and so many codes of each."""
    line, along = (-1, -2) if codes.stride(-2) == 1 else (-2, -1)

    def of_tiles(given: Tensor | None) -> tuple[int, ...]:
        if given is None:
            return 0, 0, 0, 0
        strides = [0 if size == 1 else stride for size, stride in zip(given.shape, given.stride(), strict=True)]
        return given.data_ptr(), strides[0], strides[line], strides[along]

    of_product = 0 if codes.dim() == 2 else codes.stride(0)
    given = (*of_tiles(scales), *of_tiles(zeros), *map(_power, tile))
    return codes.data_ptr(), of_product, codes.stride(line), *given


def _power(tile: int) -> int:
    """The power of two that a tile is, or is less than."""
    return (tile - 1).bit_length()


def _call(
    way: int, rows: Tensor, codes: Tensor, coding: tuple[int, ...], sizes: tuple[int, ...], out: Tensor
) -> None:
    has_scales, has_zeros = (coding[place] != 0 for place in (3, 7))
    call = CALL.pack(rows.data_ptr(), out.data_ptr(), *sizes, *coding)
    kind = SHIFTED if has_zeros else SCALED if has_scales else AS_THEY_ARE
    library().few_coded_rows(call, rows.dtype == torch.bfloat16, CODES.index(codes.dtype), kind, way)


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
