"""few_rows: a few rows times a weight, which is read once, as it is stored.

Letters: B products, M rows, K numbers of a row, N results of a row."""

import struct
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean
from mla_fx.target import Compiled

from . import wide_products
from .built import built

FUNCTIONS = {torch.bfloat16: "few_bfloat16_rows", torch.float16: "few_float16_rows"}
CALL = struct.Struct("11q")  # `Call` in the C++ file
STEP = 32  # numbers of a row that are read at once
FOR_ONE_ROW, FOR_SEVERAL = 2**19, 2**17  # numbers of the weights, at least; measured against loops and a library
MOST_ROWS = 16  # as in the C++ file; measured: with AMX, so many take as long as one


def lower(rows: Tensor, weight: Tensor) -> Compiled:
    """Lower a product of [M, K] and [K, N], or of B of each, where M may be symbolic. Raises NoMatch for others."""
    sizes, strides = weight.shape, weight.stride()
    least = FOR_ONE_ROW if rows.shape[-2] == 1 else FOR_SEVERAL
    if not all(isinstance(number, int) for number in (*sizes, *strides)) or weight.numel() < least:
        raise NoMatch("the kernel is for large weights of fixed sizes")
    if weight.device.type != "cpu" or rows.dtype != weight.dtype or weight.dtype not in FUNCTIONS:
        raise NoMatch("the kernel is for CPUs and 16 bits")
    if not are_taken(rows):
        raise NoMatch("a library multiplies such rows faster")
    if isinstance(rows.shape[-2], int) and rows.shape[-2] > MOST_ROWS:
        return few_rows
    if sizes[-2] % STEP != 0 or not (is_dense(weight) or is_dense(weight.mT)):
        raise NoMatch(f"the kernel is for rows of a multiple of {STEP} numbers, and weights that are stored densely")
    if library() is None:
        raise NoMatch("its C++ kernel was not built")
    if strides[-2] != 1 and (weight.dtype != torch.bfloat16 or not library().has_tiles()):
        raise NoMatch("the kernel multiplies rows of a weight by AMX alone")
    return few_rows


def are_taken(rows: Tensor) -> bool:
    """Whether there are few rows, or more than a library multiplies fast."""
    count = rows.shape[-2]
    is_known = isinstance(count, int)
    return not is_known or 0 < count <= MOST_ROWS or (count > 0 and wide_products.are_faster(rows.dtype))


def run(rows: Tensor, weight: Tensor) -> Tensor:
    """[M, K] @ [K, N] or [B, M, K] @ [B, K, N]"""
    count = rows.shape[-2]
    if rows.dtype not in FUNCTIONS or not 0 < count <= MOST_ROWS or library() is None:
        return wide_products.product(rows, weight)  # the check of a rewrite computes in float64
    rows, out, sizes = laid_out(rows, weight.shape[-1])
    is_by_columns, weight_b = weight.stride(-2) == 1, 0 if weight.dim() == 2 else weight.stride(0)
    strides = weight_b, weight.stride(-1 if is_by_columns else -2)
    call = CALL.pack(rows.data_ptr(), out.data_ptr(), *sizes, weight.data_ptr(), *strides)
    getattr(library(), FUNCTIONS[rows.dtype])(call, is_by_columns)
    return out


def laid_out(rows: Tensor, columns: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Dense rows, an empty result, and `Sizes` of the C++ file: B, M, N, K, and the strides of products and rows."""
    count, inner = rows.shape[-2:]
    rows = rows if is_dense(rows) else rows.contiguous()
    batch, rows_b = (1, 0) if rows.dim() == 2 else (rows.shape[0], rows.stride(0))
    rows_m = inner if count == 1 else rows.stride(-2)  # that of one row may be any number
    return rows, rows.new_empty((*rows.shape[:-1], columns)), (batch, count, columns, inner, rows_b, rows_m)


def fake(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], weight.shape[-1]))


def is_dense(matrix: Tensor) -> bool:
    """Whether the numbers of a row are neighbours, and rows do not overlap."""
    return bool(matrix.stride(-1) == 1 and matrix.stride(-2) >= matrix.shape[-1])


def library() -> Any:
    return built(__file__, "a product of few rows", FUNCTIONS[torch.bfloat16])


operator = define_lean("few_rows", run, fake, returns=("out",))


def few_rows(rows: Tensor, weight: Tensor) -> Tensor:
    """[M, K] @ [K, N] or [B, M, K] @ [B, K, N]"""
    product: Tensor = operator(rows, weight)
    return product
