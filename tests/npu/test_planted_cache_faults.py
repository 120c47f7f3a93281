"""Faults planted into the key side and into writes of caches, one at a time: the results of test_vendor_calls.py
differ, or the kernel refuses."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from mla_fx.lowering.ascend.operators import kv_rmsnorm_rope_cache as lowering

from mla_fx.ops.common import cache
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache import operator as rows
from mla_fx.ops.emitted.mla_prolog.samples import integers, scale
from npu import ge_releases
from npu.calls import BF16, BLOCKS, HCKV, PAGE, B, S, kv_call
from npu.lowered import A2
from npu.planted import caught_by_numbers, change_call, change_results
from npu.vendor_calls import check


def call_with_v():
    """Keys and values of two heads, with codes that have offsets."""
    draw, heads = Sampler(BF16, seed=5), 2
    args = kv_call("PA_NZ")
    args[:2] = draw.normal(B, heads, S, 192), draw.gamma(192)
    codes = [integers(draw, BLOCKS, PAGE, heads, width) for width in (192, 128)]
    numbers = [scale(draw, heads * width, size).view(heads, width) for size in (40, 7) for width in (192, 128)]
    args[5:] = *codes, *numbers, draw.normal(B, heads, S, 128)
    return args


CALLS = {
    "positions": ("Norm", lambda: kv_call("Norm")),
    "pages": ("PA", lambda: kv_call("PA")),
    "nz": ("PA_NZ", lambda: kv_call("PA_NZ")),
    "blocks": ("PA_BLK_BNSD", lambda: kv_call("PA_BLK_BNSD")),
    "nz blocks": ("PA_BLK_NZ", lambda: kv_call("PA_BLK_NZ")),
    "int8": ("PA", lambda: kv_call("PA", int8=True)),
    "int8 nz": ("PA_NZ", lambda: kv_call("PA_NZ", int8=True)),
    "v": ("PA_NZ", call_with_v),
}


def compare(converted, name):
    cache_mode, arguments = CALLS[name]
    options = {"surface": replace(A2, cann="9.0.0"), "cache_mode": cache_mode, "epsilon": 0.1}
    with mock.patch.object(ge_releases, "RELEASE", "9.0.0"):
        check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", arguments(), **options)


@pytest.mark.parametrize("name", CALLS)
def test_no_fault(converted, name):
    compare(converted, name)


# --- the call that is made ----------------------------------------------------------------------------------------


def moved(x):
    """Each element at the place of its neighbour."""
    return torch.cat((x[..., 1:], x[..., :1]), -1)


ARGUMENTS = {
    "epsilon lost": ("pages", lambda a: {"epsilon": 1e-5}),
    "sin and cos swapped": ("pages", lambda a: {"sin": a.cos, "cos": a.sin}),
    "tables of the first sequence for all": ("pages", lambda a: {"cos": a.cos[:1].expand(B, -1, -1, -1)}),
    "rotary columns before latents": ("pages", lambda a: {"kv": torch.cat((a.kv[..., HCKV:], a.kv[..., :HCKV]), -1)}),
    "slots off by one": ("pages", lambda a: {"index": (a.index + 1) % (BLOCKS * PAGE)}),
    "a token without a slot stored in the first": ("nz", lambda a: {"index": a.index.clamp(min=0)}),
    "positions of the first sequence for all": ("positions", lambda a: {"index": a.index[:1].expand(B, -1)}),
    "block numbers given as first slots": ("blocks", lambda a: {"index": a.index // PAGE}),
    "a negative block stored in the first": ("nz blocks", lambda a: {"index": a.index.clamp(min=0)}),
    "pages in FRACTAL_NZ as plain ones": ("nz", lambda a: {"cache_mode": "PA"}),
    "int8 pages in FRACTAL_NZ as plain ones": ("int8 nz", lambda a: {"cache_mode": "PA"}),
    "blocks as tokens' slots in FRACTAL_NZ": ("nz blocks", lambda a: {"cache_mode": "PA_BLK_BNSD"}),
    "scales of another column of latents": ("int8", lambda a: {"c_kv_scale": moved(a.c_kv_scale)}),
    "scales of rotary keys inverted": ("int8", lambda a: {"k_rope_scale": a.k_rope_scale.reciprocal()}),
    "scales of another head": ("v", lambda a: {"k_rope_scale": a.k_rope_scale.flip(0)}),
    "offsets of values lost": ("v", lambda a: {"c_kv_offset": None}),
    "offsets of keys negative": ("v", lambda a: {"k_rope_offset": -a.k_rope_offset}),
    "values of another head": ("v", lambda a: {"v": a.v.flip(1)}),
}

REFUSED = {
    "slots behind the end": (
        "pages",
        lambda a: {"index": a.index + BLOCKS * PAGE},
        "is behind the end of a cache of 512",
    ),
    "positions behind the end": (
        "positions",
        lambda a: {"index": a.index + 512},
        "is behind the end of a cache of 512",
    ),
    "a cache mode of this package": ("pages", lambda a: {"cache_mode": "PA_BSND"}, "cache_mode is 'PA_BSND'"),
    "codes without scales": (
        "int8",
        lambda a: {"c_kv_scale": None},
        "a cache is torch.int8; its rows are torch.bfloat16",
    ),
    "offsets without scales": ("v", lambda a: {"c_kv_scale": None}, "c_kv_offset is given without c_kv_scale"),
    "tables of the first sequence alone": ("pages", lambda a: {"cos": a.cos[:1]}, "cos is .* it has rows for kv"),
}


def change_arguments(monkeypatch, change):
    """In spite of what the lowering would do for them."""
    change_call(monkeypatch, lowering, change)
    monkeypatch.setattr(lowering, "for_each_sequence", lambda table, batch: table.contiguous())


@pytest.mark.parametrize("fault", ARGUMENTS)
def test_arguments(converted, monkeypatch, fault):
    name, change = ARGUMENTS[fault]
    change_arguments(monkeypatch, change)
    with caught_by_numbers():
        compare(converted, name)


@pytest.mark.parametrize("fault", REFUSED)
def test_arguments_that_the_kernel_refuses(converted, monkeypatch, fault):
    name, change, sentence = REFUSED[fault]
    change_arguments(monkeypatch, change)
    with pytest.raises(ValueError, match=sentence):
        compare(converted, name)


# --- what is made of its results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pages", "positions"])
def test_rows_that_were_not_asked_for_are_read(converted, monkeypatch, name):
    """They are undefined: with is_output_kv False, and in "Norm" always."""
    kernel, rows = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional, []

    def undefined(*args, **options):
        results = kernel(*args, **options | {"is_output_kv": False})
        rows[:] = results[:2]
        return results

    undefined.default = kernel.default
    monkeypatch.setattr(torch.ops.npu, "npu_kv_rmsnorm_rope_cache_v2_functional", undefined)
    monkeypatch.setattr(lowering, "body", lambda a: rows)
    with caught_by_numbers():
        compare(converted, name)


def stale(a, results):
    """The latents as they were before."""
    return results[0], a.ckv_cache.clone(), *results[2:]


def rows_moved(a, results):
    """Each row is that of the token before."""
    return *results[:3], torch.cat((results[3][:, :, -1:], results[3][:, :, :-1]), 2)


@pytest.mark.parametrize("fault", [stale, rows_moved])
def test_results(converted, monkeypatch, fault):
    change_results(monkeypatch, lowering, fault)
    with caught_by_numbers():
        compare(converted, "pages")


# --- the package's own operator, which the kernel is compared with ------------------------------------------------


def blocks_in_reverse(whole):
    """The last columns of a row in the first of its blocks."""
    return lambda grid, rows, cache_mode: whole(grid, rows, cache_mode).flip(-2)


def sixteen_columns(whole):
    """Blocks of FRACTAL_NZ have 16 columns whatever their dtype."""
    return lambda pages: pages.view(len(pages), pages.shape[3] // 16, pages.shape[1], 16)


def skipped_tokens_written(whole):
    return lambda grid, index, values, cache_mode: (index, values)


def written_whole_pages(whole):
    """Slots of pages go on where the pages of the sequence before end."""
    return lambda index, batch, steps, size: index.repeat_interleave(size)[: batch * steps].contiguous()


def offset_in_the_page_lost(whole):
    return lambda grid, index, cache_mode: [index // grid.shape[1], torch.zeros_like(index)]


OPERATOR = {
    "blocks of FRACTAL_NZ in reverse": ("nz", cache, "_values", blocks_in_reverse),
    "blocks of FRACTAL_NZ of 16 columns in int8": ("int8 nz", cache, "as_nz", sixteen_columns),
    "tokens without a slot written at the end": ("blocks", cache, "_skip_negative", skipped_tokens_written),
    "every token of a page in its first row": ("pages", cache, "_address", offset_in_the_page_lost),
    "sequences that do not begin a page": ("blocks", rows, "page_slots", written_whole_pages),
    "codes truncated": ("int8", rows, "i8_trunc", lambda whole: lambda x: whole(x.trunc())),
    "heads of values by tokens": (
        "v",
        rows,
        "as_one_head",
        lambda whole: lambda cache, slots, x, mode: whole(cache, slots, x.flip(1), mode),
    ),
}


@pytest.mark.parametrize("fault", OPERATOR)
def test_operator(converted, monkeypatch, fault):
    name, module, function, plant = OPERATOR[fault]
    monkeypatch.setattr(module, function, plant(getattr(module, function)))
    with caught_by_numbers():
        compare(converted, name)
