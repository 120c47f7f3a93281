"""What attention refuses, by the form of a call: a sentence, and what changes in a call that is taken."""

import math
import re

import pytest
import torch
from lib import attention_forms as forms
from lib.attention_forms import TABLE
from lib.operators.harness import by_name, changed, refuses

from mla_fx.ops.emitted.attention import operator as attention
from mla_fx.ops.emitted.attention import samples
from mla_fx.ops.emitted.attention.chosen_rows import chosen

LENS, MASK = torch.tensor([5, 3]), torch.ones(3, 5).bool()
INDICES = torch.arange(4).expand(2, 3, 1, 4)
CAUSAL = {"scale": 0.3, "is_causal": True}
INT8, ONE, ROW = torch.Tensor.char, torch.ones(1, 1, 1), torch.zeros(1, 3, 1, 4).long()
BASES = {
    "latents": lambda: forms.latents(torch.float32, 0),
    "heads": lambda: forms.heads(torch.float32, 0),
    "pages": lambda: forms.pages(4),
    "fractals": forms.fractals,
    "packed": lambda: by_name(attention.operator, *samples.packed(torch.float32, 0, CAUSAL, 3, 1, 5)),
}
BOTH = {
    "kr_cache is given and query_rope is None; a rotary part has both, or there is none": {"query_rope": None},
    "query_rope is given and kr_cache is None": {"kr_cache": None},
    "mask is given and is_causal is True": {"mask": MASK, "is_causal": True},
    r"fill is -1\.5, but mask is no bool mask and": {"fill": -1.5},
    r"fill is -1\.5, but mask is no bool mask": {"mask": torch.zeros(3, 5), "fill": -1.5},
    **{
        f"fill is {fill}; it must be finite, or None for minus infinity": {"mask": MASK, "fill": fill}
        for fill in (-math.inf, math.inf, math.nan)
    },
    "context_lens is given and mask is given": {"mask": MASK, "context_lens": LENS},
    "context_lens is given and is_causal is True": {"context_lens": LENS, "is_causal": True},
    r"context_lens has dtype torch\.int32; allowed: torch\.int64": {"context_lens": LENS.int()},
    r"context_lens has shape \[4\]; it must be \[B\] = \[2\]": {"context_lens": LENS.repeat(2)},
    r"context_lens has shape \[\]; it must be \[B\]": {"context_lens": torch.tensor(5)},
    "context_lens is on meta; it must be on cpu": {"context_lens": LENS.to("meta")},
}
LATENTS = {
    r"query has shape \[3, 3, 16\]; it must be \[B, S, N, Hckv\]": {"query": lambda q: q[0]},
    r"query_rope has shape \[2, 2, 3, 4\]": {"query_rope": lambda q: q[:, 1:]},
    r"kv_cache has shape \[1, 2, 5, 16\]; it must be \[B, T, Hckv\]": {"kv_cache": lambda c: c[None]},
    r"kv_cache has shape \[2, 5, 15\]": {"kv_cache": lambda c: c[..., 1:]},
    r"kr_cache has shape \[2, 4, 4\]": {"kr_cache": lambda c: c[:, 1:]},
    r"mask has shape \[3, 4\]; it must broadcast to \[B, N, S, T\]": {"mask": torch.zeros(3, 4)},
    r"mask has shape \[1, 1, 1, 1, 5\]": {"mask": torch.zeros(1, 1, 1, 1, 5)},
    "mask has dtype torch.int64": {"mask": torch.zeros(3, 5).long()},
    r"sinks has shape \[4\]; it must be \[N\] = \[3\]": {"sinks": torch.zeros(4)},
    "sinks has dtype torch.int64": {"sinks": torch.zeros(3).long()},
    # chosen rows
    r"indices has shape \[2, 3, 4\]; it must be \[B, S, 1, K\]": {"indices": INDICES[:, :, 0]},
    r"indices has shape \[1, 3, 1, 4\]": {"indices": INDICES[:1]},
    "indices has dtype torch.float32; allowed: torch.int32, torch.int64": {"indices": INDICES.float()},
    "indices hold a key behind a negative number": {"indices": -INDICES.flip(-1)},
    "indices hold 8; they must be below 5, the length of the contexts": {"indices": INDICES + 5},
    "is_causal is True and indices are given; it must be False": {"indices": INDICES, "is_causal": True},
    "fill is -1.0 and indices are given; it must":
        {"indices": INDICES, "fill": -1.0, "context_lens": torch.tensor([5])},
    # codes
    "kv_cache has dtype torch.int8; it must be torch.float32": {"kv_cache": INT8},
    "kv_cache has dtype torch.float32; allowed: torch.int8, torch.float8": {"kv_scales": ONE},
    "kv_scales has shape .1, 1.; it must be .B, T, C. or .BlockNum, ": {"kv_cache": INT8, "kv_scales": ONE[0]},
    "it must be .2 or 1, 5 or 1, a divisor of 16., for kv_cache": {"kv_cache": INT8, "kv_scales": torch.ones(3, 1, 1)},
    "kv_scales has shape .1, 4, 1.": {"kv_cache": INT8, "kv_scales": torch.ones(1, 4, 1)},
    "kv_scales has shape .2, 5, 3.": {"kv_cache": INT8, "kv_scales": torch.ones(2, 5, 3)},
    "kv_scales has shape .2, 5, 0.": {"kv_cache": INT8, "kv_scales": torch.ones(2, 5, 0)},
    "kr_cache has dtype torch.float32; allowed: torch.int8":
        {"kv_cache": INT8, "kv_scales": torch.ones(2, 5, 4), "kr_scales": ONE},
    "kr_cache has dtype torch.float32; allowed": {"kr_scales": ONE},
    "kr_scales are given; they must be None without kv_scales": {"kr_cache": INT8, "kr_scales": ONE},
    "kr_scales are given; they must be None without kr_cache":
        {"query_rope": None, "kr_cache": None, "kr_scales": ONE},
}  # fmt: skip
HEADS = {
    r"query has shape \[3, 3, 8\]; it must be \[B, S, N, D\]": {"query": lambda q: q[0]},
    r"query_rope has shape \[1, 3, 3, 4\]": {"query_rope": lambda q: q[1:]},
    r"kv_cache has shape \[1, 5, 16\]": {"kv_cache": lambda c: c[:1]},
    "kr_cache has dtype torch.float16": {"kr_cache": torch.Tensor.half},
    r"weight_uk has shape \[3, 7, 16\]": {"weight_uk": lambda w: w[:, 1:]},
    r"weight_uv has shape \[2, 6, 16\]": {"weight_uv": lambda w: w[1:]},
    "weight_uv is given and weight_uk is None; heads are expanded by both, or by none": {"weight_uk": None},
    r"sinks has shape \[1, 3\]; it must be \[N\]": {"sinks": torch.zeros(1, 3)},
    "max_absorbed_tokens is -1; it must be 0 or more": {"max_absorbed_tokens": -1},
    "B is 2 and lens are given; it must be 1": {"lens": [3]},
    r"indices has shape \[1, 3, 1, 4\]": {"indices": ROW},
}
PAGES = {
    "block_table has shape [3, 3]; it must be [B, Blocks] = [2, *]": {"block_table": TABLE[:1].expand(3, -1)},
    "block_table has shape [6]; it must be [B, Blocks]": {"block_table": TABLE.flatten()},
    "block_table has dtype torch.int16; allowed: torch.int32, torch.int64": {"block_table": TABLE.short()},
    "block_table holds 3; it must be below 3, the number of blocks of kv_cache": {"block_table": TABLE + 1},
    "block_table holds -4; it must be below 3": {"block_table": TABLE - 1},
    "kr_cache has shape [3, 5, 4]; it must be [BlockNum, BlockSize, Dr] = [*, 4, 4]":
        {"kr_cache": torch.zeros(3, 5, 4).double()},
    "mask has shape [2, 4]; it must broadcast to [B, N, S, T] = [2, 3, 2, 12]": {"mask": torch.ones(2, 4).bool()},
}  # fmt: skip
FRACTALS = {
    "kr_cache has shape [3, 4, 16]; it must be [BlockNum, Dr/n0, BlockSize, n0]":
        {"kr_cache": torch.zeros(3, 4, 16).double()},
    "kr_cache has shape [3, 5, 16]; it must be [BlockNum, BlockSize, Dr] = [*, 4, 16]":
        {"kr_cache": torch.zeros(3, 2, 5, 8).double()},
    "kv_cache has shape [3, 2, 4, 8] and strides [64, 8, 16, 1]; only axis 0 may be strided":
        {"kv_cache": torch.zeros(3, 4, 2, 8).double().transpose(1, 2)},
}  # fmt: skip
PACKED = {
    "kr_cache is given and query_rope is None": {"query_rope": None},
    r"kr_cache has shape \[1, 9, 4\]": {"kv_cache": lambda c: c[:, 1:]},
    "T is 8 and lens are given": dict.fromkeys(("kv_cache", "kr_cache"), lambda c: c[:, 1:]),
    r"weight_uk has shape \[2, 8, 16\]": {"weight_uk": lambda w: w[1:]},
    "lens are given and weight_uk is None": {"weight_uk": None, "weight_uv": None},
    r"lens is \[\]; it must have one or more numbers, each 0 or more": {"lens": []},
    r"lens is \[10, -1\]; it must have one or more numbers, each 0 or more": {"lens": [10, -1]},
    r"lens is \[3, 1, 4\]; its sum must be S = 9": {"lens": [3, 1, 4]},
    "sinks is given and lens are given; packed sequences have causality alone": {"sinks": torch.zeros(3)},
    "context_lens is given and lens are given": {"context_lens": torch.tensor([9]), "is_causal": False},
}
REFUSALS = {
    "latents": BOTH | LATENTS,
    "heads": BOTH | HEADS,
    "pages": {re.escape(sentence): changes for sentence, changes in PAGES.items()},
    "fractals": {re.escape(sentence): changes for sentence, changes in FRACTALS.items()},
    "packed": PACKED,
}


@pytest.mark.parametrize(("base", "message"), [(base, message) for base in REFUSALS for message in REFUSALS[base]])
def test_refusals(base, message):
    given = by_name(attention.operator, (), BASES[base]() | {"scale": 0.3})
    for name, change in REFUSALS[base][message].items():
        given = changed(given, name, change)
    refuses(attention.operator, (), given, message)


def test_chosen_rows_are_not_read_out_of_fractals():
    paged = samples.in_fractals(*samples.paged_sample(torch.float32, 0, 3, torch.tensor([70, 3]), 16))
    args, options = chosen(*paged)
    with pytest.raises(ValueError, match=r"kv_cache has shape .*: chosen rows are not read out of FRACTAL_NZ"):
        torch.ops.mla_fx.attention(*args, **options)
