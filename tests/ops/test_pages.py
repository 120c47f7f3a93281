"""Attention over pages: pages of any size, tables of any kind of number, and what is refused of either."""

import re

import pytest
import torch
from lib.operators.plain_oracle import expect

from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.pages import TILE

TABLE = torch.tensor([[1, 0, 2], [2, -3, 2]])


def pages_of(size, table=TABLE, steps=2):
    query, rope, *_ = samples.sample(torch.float64, 0, steps)
    generator = torch.Generator().manual_seed(1)
    caches = (torch.randn(3, size, part.shape[-1], generator=generator, dtype=torch.float64) for part in (query, rope))
    return query, rope, *caches, None, None, None, table


@pytest.mark.parametrize("size", [1, 3, TILE, TILE + 100], ids=str)
def test_pages_of_any_size(size):
    expect(attention.operator, pages_of(size), {"scale": 0.3})


def test_tables_of_fewer_bits_and_other_strides():
    turned = TABLE.T.contiguous().T
    for table in (TABLE.int(), turned, turned.int(), TABLE[:1].expand(2, -1)):
        expect(attention.operator, pages_of(4, table), {"scale": 0.3})


@pytest.mark.parametrize("limit", [0, 2])
def test_no_pages(limit):
    query, rope, *caches, _, _, _, table = pages_of(4)
    out = torch.ops.mla_fx.attention(query, rope, *caches, None, block_table=table[:, :0], scale=0.3)[0]
    assert torch.equal(out, torch.zeros_like(query))
    (query, *_), options = samples.with_heads((query, rope), {"scale": 0.3, "max_absorbed_tokens": limit})
    out = torch.ops.mla_fx.attention(query, rope, *caches, block_table=table[:, :0], **options)[0]
    assert torch.equal(out, torch.zeros_like(out))


def test_caches_of_different_numbers_of_blocks():
    query, rope, kv_cache, kr_cache, *rest = pages_of(4, TABLE.remainder(3))
    expect(attention.operator, (query, rope, kv_cache, torch.cat((kr_cache, kr_cache)), *rest), {"scale": 0.3})


REFUSALS = {
    "block_table has shape [3, 3]; it must be [B, Blocks] = [2, *]": {"block_table": TABLE[:1].expand(3, -1)},
    "block_table has shape [6]; it must be [B, Blocks]": {"block_table": TABLE.flatten()},
    "block_table has dtype torch.int16; allowed: torch.int32, torch.int64": {"block_table": TABLE.short()},
    "block_table holds 3; it must be below 3, the number of blocks of kv_cache": {"block_table": TABLE + 1},
    "block_table holds -4; it must be below 3": {"block_table": TABLE - 1},
    "kr_cache has shape [3, 5, 4]; it must be [BlockNum, BlockSize, Dr] = [*, 4, 4]": {
        "kr_cache": torch.zeros(3, 5, 4).double()
    },
    "mask has shape [2, 4]; it must broadcast to [B, N, S, T] = [2, 3, 2, 12]": {"mask": torch.ones(2, 4).bool()},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_is_refused_of_pages(reason):
    names = ("query", "query_rope", "kv_cache", "kr_cache", "mask", "context_lens", "sinks", "block_table")
    arguments = dict(zip(names, pages_of(4), strict=True)) | REFUSALS[reason]
    with pytest.raises(ValueError) as refusal:
        torch.ops.mla_fx.attention(**arguments, scale=0.3)
    assert reason in str(refusal.value)


def nz_call(lanes=8):
    query, rope, *_ = samples.sample(torch.float64, 0, 2, width=16)
    caches = (torch.zeros(3, part.shape[-1] // lanes, 4, lanes).double() for part in (query, rope))
    return query, rope, *caches, None, None, None, TABLE


NZ_REFUSALS = {
    "kr_cache has shape [3, 4, 16]; it must be [BlockNum, Dr/n0, BlockSize, n0]": {3: torch.zeros(3, 4, 16).double()},
    "kr_cache has shape [3, 5, 16]; it must be [BlockNum, BlockSize, Dr] = [*, 4, 16]": {
        3: torch.zeros(3, 2, 5, 8).double()
    },
    "kv_cache has shape [3, 2, 4, 8] and strides [64, 8, 16, 1]; only axis 0 may be strided": {
        2: torch.zeros(3, 4, 2, 8).double().transpose(1, 2)
    },
}


@pytest.mark.parametrize("reason", NZ_REFUSALS)
def test_pages_in_fractal_nz_that_are_refused(reason):
    given = [*nz_call()]
    for place, value in NZ_REFUSALS[reason].items():
        given[place] = value
    with pytest.raises(ValueError, match=re.escape(reason)):
        torch.ops.mla_fx.attention(*given, scale=0.3)


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_fractals_of_any_width(lanes):
    given = [*nz_call(lanes)]
    torch.manual_seed(0)
    given[2:4] = (torch.randn_like(pages) for pages in given[2:4])
    expect(attention.operator, tuple(given), {"scale": 0.3})
