"""Calls of the key side, whose results are those of the package's own operator, and faults of them and of writes."""

import functools
from dataclasses import replace
from unittest import mock

import torch
from mla_fx.lowering.ascend.operators import kv_rmsnorm_rope_cache as lowering

from mla_fx.ops.common import cache
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache import operator as rows
from mla_fx.ops.emitted.mla_prolog.samples import integers, scale
from npu import ge_releases
from npu.calls import BF16, BLOCKS, DR, HCKV, PAGE, B, S, kv_call
from npu.lowered import A2, Call
from npu.planted import arguments, moved, replaced, results


def call_with_v():
    """Keys and values of two heads, with codes that have offsets."""
    draw, heads = Sampler(BF16, seed=5), 2
    args = kv_call("PA_NZ")
    args[:2] = draw.normal(B, heads, S, 192), draw.gamma(192)
    codes = [integers(draw, BLOCKS, PAGE, heads, width) for width in (192, 128)]
    numbers = [scale(draw, heads * width, size).view(heads, width) for size in (40, 7) for width in (192, 128)]
    args[5:] = *codes, *numbers, draw.normal(B, heads, S, 128)
    return args


KERNEL = "KvRmsNormRopeCache"
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


def run(name, how):
    cache_mode, given = CALLS[name]
    surface = replace(A2, cann="9.0.0")
    call = Call("kv_rmsnorm_rope_cache", given(), {"cache_mode": cache_mode, "epsilon": 0.1}, surface)
    with mock.patch.object(ge_releases, "RELEASE", surface.cann):
        torch.testing.assert_close(how(call), call.wanted(), rtol=0, atol=0)


# --- what is planted ----------------------------------------------------------------------------------------------


def changed(change):
    """In spite of what the lowering would do for these arguments."""

    def plant(patch):
        arguments(lowering, change)(patch)
        patch.setattr(lowering, "for_each_sequence", lambda table, batch: table.contiguous())

    return plant


found = functools.partial(results, lowering)


def as_before(a, all):
    return all[0], a.ckv_cache.clone(), *all[2:]


def of_the_token_before(a, all):
    return *all[:3], moved(all[3], 1, 2)


def unasked(patch):
    """Rows are read that were not asked for, and so are undefined: with is_output_kv False, and in "Norm" always."""
    kernel, found = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional, []

    def undefined(*args, **options):
        results = kernel(*args, **options | {"is_output_kv": False})
        found[:] = results[:2]
        return results

    patch.setattr(torch.ops.npu, "npu_kv_rmsnorm_rope_cache_v2_functional", undefined)
    patch.setattr(lowering, "body", lambda a: found)


FAULTS = {
    "epsilon lost": ("pages", changed(lambda a: {"epsilon": 1e-5})),
    "sin and cos swapped": ("pages", changed(lambda a: {"sin": a.cos, "cos": a.sin})),
    "tables of the first sequence for all": ("pages", changed(lambda a: {"cos": a.cos[:1].expand(B, -1, -1, -1)})),
    "rotary columns before latents": (
        "pages",
        changed(lambda a: {"kv": torch.cat((a.kv[..., HCKV:], a.kv[..., :HCKV]), -1)}),
    ),
    "slots off by one": ("pages", changed(lambda a: {"index": (a.index + 1) % (BLOCKS * PAGE)})),
    "a token without a slot stored in the first": ("nz", changed(lambda a: {"index": a.index.clamp(min=0)})),
    "positions of the first sequence for all": ("positions", changed(lambda a: {"index": a.index[:1].expand(B, -1)})),
    "block numbers given as first slots": ("blocks", changed(lambda a: {"index": a.index // PAGE})),
    "a negative block stored in the first": ("nz blocks", changed(lambda a: {"index": a.index.clamp(min=0)})),
    "pages in FRACTAL_NZ as plain ones": ("nz", changed(lambda a: {"cache_mode": "PA"})),
    "int8 pages in FRACTAL_NZ as plain ones": ("int8 nz", changed(lambda a: {"cache_mode": "PA"})),
    "blocks as tokens' slots in FRACTAL_NZ": ("nz blocks", changed(lambda a: {"cache_mode": "PA_BLK_BNSD"})),
    "scales of another column of latents": ("int8", changed(lambda a: {"c_kv_scale": moved(a.c_kv_scale, 1)})),
    "scales of latents lost": ("int8", changed(lambda a: {"c_kv_scale": torch.ones_like(a.c_kv_scale)})),
    "scales of both caches swapped": (
        "int8",
        changed(lambda a: {"k_rope_scale": a.c_kv_scale[:DR], "c_kv_scale": a.k_rope_scale.repeat(HCKV // DR)}),
    ),
    "scales of rotary keys inverted": ("int8", changed(lambda a: {"k_rope_scale": a.k_rope_scale.reciprocal()})),
    "scales of another head": ("v", changed(lambda a: {"k_rope_scale": a.k_rope_scale.flip(0)})),
    "offsets of values lost": ("v", changed(lambda a: {"c_kv_offset": None})),
    "offsets of keys negative": ("v", changed(lambda a: {"k_rope_offset": -a.k_rope_offset})),
    "values of another head": ("v", changed(lambda a: {"v": a.v.flip(1)})),
    # what the kernel refuses
    "slots behind the end": (
        "pages",
        changed(lambda a: {"index": a.index + BLOCKS * PAGE}),
        "is behind the end of a cache of 512",
    ),
    "positions behind the end": (
        "positions",
        changed(lambda a: {"index": a.index + 512}),
        "is behind the end of a cache of 512",
    ),
    "a cache mode of this package": (
        "pages",
        changed(lambda a: {"cache_mode": "PA_BSND"}),
        "cache_mode is 'PA_BSND'",
    ),
    "codes without scales": (
        "int8",
        changed(lambda a: {"c_kv_scale": None}),
        "a cache is torch.int8; its rows are torch.bfloat16",
    ),
    "offsets without scales": (
        "v",
        changed(lambda a: {"c_kv_scale": None}),
        "c_kv_offset is given without c_kv_scale",
    ),
    "tables of the first sequence alone": (
        "pages",
        changed(lambda a: {"cos": a.cos[:1]}),
        "cos is .* it has rows for kv",
    ),
    # what is made of its results
    "undefined rows of pages read": ("pages", unasked),
    "undefined rows of sequences read": ("positions", unasked),
    "the latents as they were before": ("pages", found(as_before)),
    "rows of the token before": ("pages", found(of_the_token_before)),
    # in the package's own operator, and in how it writes caches
    "blocks of FRACTAL_NZ in reverse": (
        "nz",
        replaced(cache, "_values", lambda whole: lambda grid, rows, mode: whole(grid, rows, mode).flip(-2)),
    ),
    "blocks of FRACTAL_NZ of 16 columns in int8": (
        "int8 nz",
        replaced(
            cache, "as_nz", lambda whole: lambda pages: pages.view(len(pages), pages.shape[3] // 16, pages.shape[1], 16)
        ),
    ),
    "tokens without a slot written at the end": (
        "blocks",
        replaced(cache, "_skip_negative", lambda whole: lambda grid, index, values, mode: (index, values)),
    ),
    "every token of a page in its first row": (
        "pages",
        replaced(
            cache,
            "_address",
            lambda whole: lambda grid, index, mode: [index // grid.shape[1], torch.zeros_like(index)],
        ),
    ),
    "sequences that go on where the one before ends": (
        "blocks",
        replaced(
            rows,
            "page_slots",
            lambda whole: lambda index, batch, steps, size: (
                index.repeat_interleave(size)[: batch * steps].contiguous()
            ),
        ),
    ),
    "codes truncated": ("int8", replaced(rows, "i8_trunc", lambda whole: lambda x: whole(x.trunc()))),
    "heads of values by tokens": (
        "v",
        replaced(
            rows, "as_one_head", lambda whole: lambda cache, slots, x, mode: whole(cache, slots, x.flip(1), mode)
        ),
    ),
}
