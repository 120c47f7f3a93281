"""The C++ kernel for a few rows times a weight that is stored as codes: that it multiplies, and what it is not for.

The oracle is the product in float64 with the weight that the program dequantises, rounded as the program does it.
`test_few_rows.py` runs these tests on lesser processors, too."""

import itertools
import math

import pytest
import torch
from lib.kernels import draw, without_a_compiler
from mla_fx.lowering.cpu import few_coded_rows, few_rows
from mla_fx.lowering.cpu.few_coded_rows import CODES

import mla_fx
from mla_fx.errors import NoMatch

pytestmark = pytest.mark.usefixtures("no_gradients")

DTYPES = (torch.bfloat16, torch.float16)
COUNTS = (1, 2, 3, 8, 16)
BLOCK = 128
LAYOUTS = {
    "none": None,
    "one": (0, 0),
    "rows": (1, 0),
    "columns": (0, 1),
    "groups": (32, 1),
    "large groups": (128, 1),
    "blocks": (BLOCK, BLOCK),
}  # the sizes of a tile, along K and N; 0 is all of it


def codes_of(dtype, *shape):
    """Dense codes, among them the largest."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    found = (draw(*shape) * torch.finfo(dtype).max / 4).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return found.to(dtype)


def tiles(codes, layout, largest=1.0):
    """Scales of a weight [B, K, N], the sizes of their tiles, and the scale of each code."""
    if layout is None:
        return None, codes.shape[1], codes.shape[2], torch.ones(1)
    tile_k, tile_n = (tile or size for tile, size in zip(layout, codes.shape[1:], strict=True))
    counts = math.ceil(codes.shape[1] / tile_k), math.ceil(codes.shape[2] / tile_n)
    scales = (draw(codes.shape[0], *counts).abs() + 0.1) * largest
    each = scales.repeat_interleave(tile_k, 1).repeat_interleave(tile_n, 2)
    return scales, tile_k, tile_n, each[:, : codes.shape[1], : codes.shape[2]]


def check(rows, codes, given, weight):
    found, exact = few_coded_rows.run(rows, codes, *given), rows.double() @ weight.double()
    error, plain = ((one.double() - exact).norm() / exact.norm() for one in (found, rows @ weight))
    assert found.dtype == rows.dtype and found.is_contiguous()
    assert error <= 2 * plain + torch.finfo(torch.float32).eps, (codes.dtype, given[2:], error, plain)


SHAPES = ((1, 128, 37), (2, 320, 160), (3, 64, 96))  # products, numbers of a row, results of a row


def small(dtype, inner):
    """A scale by which the weight has entries around 1 / sqrt(inner)."""
    return inner**-0.5 / (127 if dtype == torch.int8 else torch.finfo(dtype).max)


def weights(dtype, shape, layout):
    """A weight by columns and one by rows, if it can be, each with its tiles and the numbers that it is."""
    batch, inner, columns = shape
    for by_rows in (False, True):
        codes = codes_of(dtype, batch, inner, columns) if by_rows else codes_of(dtype, batch, columns, inner).mT
        scales, tile_k, tile_n, each = tiles(codes, LAYOUTS[layout], small(dtype, inner))
        length, along = (columns, tile_n) if by_rows else (inner, tile_k)
        if length % 32 == 0 and (along >= length or along % 32 == 0):
            yield codes, scales, tile_k, tile_n, each


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
def test_it_is_a_product_with_what_the_codes_are(codes_dtype, layout):
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        for codes, scales, tile_k, tile_n, each in weights(codes_dtype, shape, layout):
            if scales is None and codes_dtype != torch.int8 and dtype == torch.float16:
                continue  # sums leave the range
            weight = (codes.float() * each).to(dtype)
            for count in COUNTS:
                rows = draw(shape[0], count, shape[1], seed=1).to(dtype)
                check(rows, codes, (scales, None, tile_k, tile_n), weight)


@pytest.mark.parametrize("layout", ["one", "columns", "groups", "blocks"])
def test_zero_points_belong_to_the_codes(layout):
    for dtype, shape, count in itertools.product(DTYPES, SHAPES, COUNTS):
        for codes, scales, tile_k, tile_n, each in weights(torch.int8, shape, layout):
            zeros = torch.randint(-8, 8, scales.shape, generator=torch.Generator().manual_seed(1)).float()
            shifts = zeros.repeat_interleave(tile_k, 1).repeat_interleave(tile_n, 2)[:, : shape[1], : shape[2]]
            weight = ((codes.float() - shifts) * each).to(dtype)
            check(draw(shape[0], count, shape[1], seed=1).to(dtype), codes, (scales, zeros, tile_k, tile_n), weight)


def test_many_rows_and_other_dtypes_multiply_the_numbers():
    for codes, scales, tile_k, tile_n, each in weights(torch.float8_e4m3fn, (2, 64, 96), "columns"):
        for dtype, count in itertools.product((*DTYPES, torch.float64), (0, 17, 40)):
            rows = draw(2, count, 64).to(dtype)
            weight = (codes.to(torch.promote_types(dtype, torch.float32)) * each).to(dtype)
            found = few_coded_rows.run(rows, codes, scales, None, tile_k, tile_n)
            assert torch.equal(found, rows @ weight)


def every_code(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
def test_every_code_is_the_number_that_it_is_cast_to(codes_dtype):
    """Also NaN, infinity, and the least ones: columns of one code each. Rows have a single number that is not zero."""
    codes = every_code(codes_dtype).view(256, 1).expand(256, 32).contiguous()
    for dtype, scale in itertools.product(DTYPES, (1.0, 2.0**-6, 0.0371, -1.5e-7, math.nan, math.inf)):
        meant = (codes.float() * scale).to(dtype)
        scales = torch.full((1, 1, 1), scale)
        written = few_coded_rows.numbers(codes.mT, scales, None, 32, 256, dtype)
        torch.testing.assert_close(written, meant.mT, rtol=0, atol=0, equal_nan=True)
        for count in (1, 8, 16, 17):
            rows = torch.zeros(count, 32, dtype=dtype)
            rows[:, 5] = 1
            found = few_coded_rows.run(rows, codes.mT, scales, None, 32, 256)
            expected = rows.float() @ meant.float().mT
            torch.testing.assert_close(found, expected.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codes_dtype", CODES, ids=str)
def test_infinite_and_undefined_numbers_meet_as_in_a_product(codes_dtype):
    given = every_code(codes_dtype)
    wild = given[~given.float().isfinite()].tolist() if codes_dtype != torch.int8 else []
    for dtype, scale, count in itertools.product(DTYPES, (1.0, math.nan, math.inf), (1, 3)):
        for code in (0.0, *wild):
            codes = codes_of(codes_dtype, 5, 64)
            codes[3, 7] = code
            scales = torch.full((1, 1, 5), small(codes_dtype, 64))
            scales[0, 0, 1] = scale
            weight = (codes.mT.float() * scales[0]).to(dtype)
            rows = draw(count, 64).to(dtype)
            found, meant = few_coded_rows.run(rows, codes.mT, scales, None, 64, 1), rows.float() @ weight.float()
            assert torch.equal(found.isnan(), meant.isnan()) and torch.equal(found.isinf(), meant.to(dtype).isinf())


def large(*shape, dtype=torch.int8):
    return torch.empty(*shape, dtype=dtype)


ROW = torch.empty(1, 1024).bfloat16()
REFUSED = {
    "the kernel is for CPUs, rows of 16 bits and codes of 8 bits": (ROW.float(), large(2048, 1024).mT, 1024, 1),
    "the kernel is for large weights and few rows": (torch.empty(17, 1024).bfloat16(), large(2048, 1024).mT, 1024, 1),
    "the kernel is for rows of a multiple of 32 numbers, and weights that are stored densely": (
        torch.empty(1, 1000).bfloat16(), large(2048, 1000).mT, 1000, 1
    ),
    "the kernel is for tiles of a power of two, at least 32 neighbours": (ROW, large(2048, 1024).mT, 16, 1),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_is_not_for(reason):
    rows, codes, tile_k, tile_n = REFUSED[reason]
    with pytest.raises(NoMatch, match=f"^{reason}$"):
        few_coded_rows.lower(rows, codes, None, None, tile_k, tile_n)


def test_without_a_compiler_the_numbers_are_multiplied(monkeypatch):
    without_a_compiler(monkeypatch, few_rows)
    codes = codes_of(torch.int8, 70, 64).mT
    with pytest.warns(mla_fx.MlaWarning, match="runs without its C.. kernel: no compiler$"):
        found = few_coded_rows.run(draw(2, 64).bfloat16(), codes, None, None, 64, 1)
    assert torch.equal(found, draw(2, 64).bfloat16() @ codes.bfloat16())
    with pytest.raises(NoMatch, match="was not built"):
        few_coded_rows.lower(ROW, large(2048, 1024).mT, None, None, 1024, 1)
