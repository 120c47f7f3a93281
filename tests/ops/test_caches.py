"""Cache writes byte by byte: the place of each element of a row, and that nothing else changes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.operators.harness import element_at, nd_offset, nz_offset

from mla_fx.ops.common import cache as _cache

DTYPES = (torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
MODES = ("Norm", "PA", "PA_BSND", "PA_NZ", "PA_BLK_NZ")
WIDTH = 64


def raw_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).clone()


def byte_offset(cache, mode, index, place, column):
    """Where a column of the row at `place` in `rows` belongs, by the address functions; None if it is skipped."""
    size, width = cache.element_size(), cache.shape[-1]
    if mode == "Norm":
        b, s = place
        position = int(index[min(b, len(index) - 1), s])
        slot, block_size = (b * cache.shape[2] + position, cache.shape[2]) if position >= 0 else (-1, 1)
    else:
        slot, block_size = int(index[place]), cache.shape[1]
    if slot < 0:
        return None
    offset = nz_offset if mode.endswith("NZ") else nd_offset
    return offset(slot, column, block_size, width, size)


def expected(cache, mode, index, rows):
    """The bytes of the cache after the write."""
    wanted = raw_bytes(cache)
    size = cache.element_size()
    for place in itertools.product(*map(range, rows.shape[:-1])):
        row = rows[place].clone().view(torch.uint8)
        for column in range(rows.shape[-1]):
            at = byte_offset(cache, mode, index, place, column)
            if at is not None:
                wanted[at : at + size] = row[column * size : (column + 1) * size]
    return wanted


def random_bytes(shape, dtype, seed):
    """Any values, infinities and quiet NaN among them; PyTorch may quieten a signalling one as it copies it."""
    *lead, last = shape
    size = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (*lead, last * size), generator=random, dtype=torch.uint8).view(dtype)
    return torch.where(drawn.isnan(), torch.nan, drawn) if dtype.is_floating_point else drawn


def arguments(mode, dtype, *, batch=3, steps=5, blocks=4, block_size=16, negative=0.3, shared=False, seed=0):
    random = torch.Generator().manual_seed(seed)
    if mode == "Norm":
        cache = random_bytes((batch, 1, block_size, WIDTH), dtype, seed)
        rows = 1 if shared else batch
        index = torch.stack([torch.randperm(block_size, generator=random)[:steps] for _ in range(rows)])
    else:
        cache = random_bytes((blocks, block_size, 1, WIDTH), dtype, seed)
        index = torch.randperm(blocks * block_size, generator=random)[: batch * steps].view(batch, steps)
    index = torch.where(torch.rand(index.shape, generator=random) < negative, -1 - index, index)
    return cache, index, random_bytes((batch, steps, WIDTH), dtype, seed + 1)


def writes(cache, mode, index, rows):
    """Both forms write what the address functions say; the functional one leaves its argument alone."""
    wanted, before = expected(cache, mode, index, rows), raw_bytes(cache)
    updated = _cache.store(cache, index, rows, mode)
    assert (updated.shape, updated.dtype) == (cache.shape, cache.dtype)
    assert torch.equal(raw_bytes(updated), wanted)
    assert torch.equal(raw_bytes(cache), before)
    assert updated.stride() == _cache.like_store(cache, index).stride()
    _cache.store(cache, index, rows, mode, in_place=True)
    assert torch.equal(raw_bytes(cache), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("negative", [0.0, 0.3, 1.0])
def test_every_byte(mode, dtype, negative):
    writes(*_ordered(mode, arguments(mode, dtype, negative=negative)))


def _ordered(mode, parts):
    cache, index, rows = parts
    return cache, mode, index, rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("index", [[0, -1, -1], [-1, -1, 0], [-1, 5, -7], [-(2**40), 3, -1]])
def test_skipped_tokens_around_slot_0(mode, index):
    cache, _, rows = arguments(mode, torch.bfloat16, batch=1, steps=3)
    writes(cache, mode, torch.tensor([index]), rows)


def test_one_row_of_positions_serves_every_batch_row():
    cache, index, rows = arguments("Norm", torch.float32, shared=True)
    assert index.shape == (1, 5)
    writes(cache, "Norm", index, rows)


@pytest.mark.parametrize("mode", MODES)
def test_index_of_any_shape_and_strided_rows(mode):
    cache, index, rows = arguments(mode, torch.float32)
    if mode != "Norm":
        flat = cache.clone()
        writes(flat, mode, index.flatten(), rows.flatten(0, 1))
    wide = rows.new_zeros(3, 5, 2 * WIDTH)
    wide[..., WIDTH:] = rows
    writes(cache, mode, index, wide[..., WIDTH:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_cache_of_every_other_block(mode, dtype):
    """A cache that is strided in axis 0 is written in place; the blocks between its own keep every byte."""
    cache, index, rows = arguments(mode, dtype)
    larger = random_bytes((2 * cache.shape[0], *cache.shape[1:]), dtype, 9)
    larger[::2] = cache
    between = raw_bytes(larger[1::2])
    writes(larger[::2], mode, index, rows)
    assert torch.equal(raw_bytes(larger[1::2]), between)


@pytest.mark.parametrize("mode", ["Norm", "PA"])
def test_cache_that_is_part_of_each_row_of_a_buffer(mode):
    cache, index, rows = arguments(mode, torch.float32)
    buffer = torch.zeros(*cache.shape[:-1], WIDTH + 32)
    buffer[..., 32:] = cache
    writes(buffer[..., 32:], mode, index, rows)
    assert buffer[..., :32].count_nonzero() == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [{"steps": 0}, {"batch": 1, "steps": 1}, {"blocks": 0, "steps": 0}])
def test_no_token_one_token_no_slot(mode, size):
    writes(*_ordered(mode, arguments(mode, torch.bfloat16, **size)))


@pytest.mark.parametrize("mode", MODES)
def test_no_batch_row(mode):
    cache = random_bytes((0, 1, 16, WIDTH) if mode == "Norm" else (2, 16, 1, WIDTH), torch.bfloat16, 0)
    writes(cache, mode, torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, 5, WIDTH).bfloat16())


@pytest.mark.parametrize("mode", MODES)
def test_cache_without_slots_takes_skipped_tokens(mode):
    cache, _, rows = arguments(mode, torch.bfloat16)
    empty = cache[:, :, :0] if mode == "Norm" else cache[:0]
    writes(empty, mode, torch.full((3, 5), -1), rows)


@pytest.mark.parametrize("shape", [(2, 5), (7,), (0,)])
def test_without_index_the_rows_are_the_cache(shape):
    rows = random_bytes((*shape, WIDTH), torch.bfloat16, 1)
    cache = random_bytes((*shape, 1, WIDTH), torch.bfloat16, 2)
    before = raw_bytes(cache)
    updated = _cache.store(cache, None, rows, "TND")
    assert updated.shape == cache.shape
    assert torch.equal(raw_bytes(updated), raw_bytes(rows))
    assert torch.equal(raw_bytes(cache), before)
    assert rows.numel() == 0 or updated.data_ptr() != rows.data_ptr()
    _cache.store(cache, None, rows, "TND", in_place=True)
    assert torch.equal(raw_bytes(cache), raw_bytes(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_as_nz_is_a_view_by_the_address_function(dtype, stride):
    """Element (block, band, row, lane) of the view lies where element (slot, column) of an NZ cache must."""
    larger = random_bytes((3 * stride, 16, 1, WIDTH), dtype, 0)
    cache = larger[::stride]
    view = _cache.as_nz(cache)
    fractal = 32 // dtype.itemsize
    assert view.shape == (3, WIDTH // fractal, 16, fractal)
    assert view.data_ptr() == cache.data_ptr()
    for slot, column in itertools.product((0, 1, 15, 16, 47), (0, 1, fractal - 1, fractal, WIDTH - 1)):
        page, row = divmod(slot, 16)
        element = view[page, column // fractal, row, column % fractal]
        at = nz_offset(slot, column, 16, WIDTH, dtype.itemsize)
        in_larger = at + page * (stride - 1) * 16 * WIDTH * dtype.itemsize
        assert element.data_ptr() - larger.data_ptr() == in_larger
        assert torch.equal(raw_bytes(element), raw_bytes(element_at(cache, at)))


def test_address_functions_on_known_places():
    """A cache of [2 pages, 16 rows, 64 columns] of 2 bytes: bands of 16 columns, 512 bytes each."""
    assert nd_offset(17, 3, 16, 64, 2) == 17 * 128 + 6
    assert nz_offset(0, 15, 16, 64, 2) == 30
    assert nz_offset(0, 16, 16, 64, 2) == 512
    assert nz_offset(1, 0, 16, 64, 2) == 32
    assert nz_offset(16, 0, 16, 64, 2) == 2048
    assert nz_offset(0, 32, 16, 64, 1) == 512
    places = {nz_offset(slot, column, 16, 64, 2) for slot in range(32) for column in range(64)}
    assert places == set(range(0, 2 * 16 * 64 * 2, 2))


def starts_of(pages, block_size, seed, negative):
    random = torch.Generator().manual_seed(seed)
    starts = torch.randperm(max(pages, 1), generator=random)[:pages] * block_size
    return torch.where(torch.rand(pages, generator=random) < negative, -1 - starts, starts)


SIZES = {
    "block_size": st.sampled_from([1, 2, 3, 16]),
    "seed": st.integers(0, 99),
    "negative": st.sampled_from([0.0, 0.4, 1.0]),
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=st.integers(0, 4), steps=st.integers(0, 37), **SIZES)
def test_page_slots(batch, steps, block_size, seed, negative):
    pages = math.ceil(steps / block_size)
    starts = starts_of(batch * pages, block_size, seed, negative).view(batch, pages)
    slots = _cache.page_slots(starts.flatten(), batch, steps, block_size)
    assert slots.shape == (batch, steps)
    for b, s in itertools.product(range(batch), range(steps)):
        start = int(starts[b, s // block_size])
        assert (slots[b, s] < 0) if start < 0 else (slots[b, s] == start + s % block_size)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 19), max_size=5), dtype=st.sampled_from([torch.int32, torch.int64]), **SIZES)
def test_ragged_page_slots(lengths, dtype, block_size, seed, negative):
    """Sequences without tokens have no page; each of the others starts one."""
    starts = starts_of(sum(math.ceil(length / block_size) for length in lengths), block_size, seed, negative)
    ends = torch.tensor(list(itertools.accumulate(lengths)), dtype=dtype)
    slots = _cache.ragged_page_slots(starts, ends, sum(lengths), block_size)
    page, wanted = 0, []
    for length in lengths:
        for step in range(length):
            start = int(starts[page + step // block_size])
            wanted.append(None if start < 0 else start + step % block_size)
        page += math.ceil(length / block_size)
    assert [None if slot < 0 else slot for slot in slots.tolist()] == wanted
