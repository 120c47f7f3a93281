"""Attention over pages: pages of any size, and tables of any kind of number."""

import pytest
import torch
from lib import attention_forms as forms
from lib.attention_forms import TABLE
from lib.operators.plain_oracle import expect

from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.pages import TILE


def check(given):
    expect(attention.operator, (), given | {"scale": 0.3})


@pytest.mark.parametrize("size", [1, 3, TILE, TILE + 100], ids=str)
def test_pages_of_any_size(size):
    check(forms.pages(size))


def test_tables_of_fewer_bits_and_other_strides():
    turned = TABLE.T.contiguous().T
    for table in (TABLE.int(), turned, turned.int(), TABLE[:1].expand(2, -1)):
        check(forms.pages(4, table))


@pytest.mark.parametrize("limit", [0, 2])
def test_no_pages(limit):
    given = forms.pages(4, TABLE[:, :0])
    out = torch.ops.mla_fx.attention(**given, scale=0.3)[0]
    assert torch.equal(out, torch.zeros_like(given["query"]))
    rows = given["query"], given["query_rope"]
    (given["query"], *_), options = samples.with_heads(rows, {"scale": 0.3, "max_absorbed_tokens": limit})
    out = torch.ops.mla_fx.attention(**given, **options)[0]
    assert torch.equal(out, torch.zeros_like(out))


def test_caches_of_different_numbers_of_blocks():
    given = forms.pages(4, TABLE.remainder(3))
    check(given | {"kr_cache": torch.cat((given["kr_cache"], given["kr_cache"]))})


@pytest.mark.parametrize("lanes", [1, 4, 8])
def test_fractals_of_any_width(lanes):
    check(forms.fractals(lanes))
