"""Programs for each row of the table of the vendor's documents: in plain PyTorch, and calls of the operators."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from lib import key_value_caches, packed_prologs, tiled_prologs
from lib import log_sums as over_pages
from lib.coded_heads import Coded, ZeroPoints, in_codes
from lib.layers import in_type
from lib.paged_heads import (
    Gqa,
    LogarithmOfLength,
    PagesOfHeads,
    Slopes,
    TableOfEachHead,
    arguments,
    heads_first,
    table_of_each_head,
)
from lib.zoo.caches import CACHES
from lib.zoo.entries import Entry
from lib.zoo.mla import Spelling
from lib.zoo.sizes import DECODE, FEW, Step
from mla_fx.lowering.ascend.limits import RELEASES

import mla_fx
from mla_fx.ops import catalogue
from mla_fx.ops.common.sample import Sampler
from npu import coded_pages, int8_models, models
from npu.calls import BF16, BLOCKS, PAGE, SMALL, B, D, S, Sizes, blocks_call, kv_call, pages, prolog_call, v3_call
from npu.paged_heads import sized
from npu.paged_layers import PAGED as BF16_PAGED
from npu.paged_layers import REAL, NzWholePages, WholePages

V1_HIDDEN, V1_HEADS = 7168, 32  # the only, and the fewest, that version 1 takes


@dataclass
class Program:
    run: Callable[..., Any]
    given: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self, target: str) -> None:
        torch._dynamo.reset()
        backend = mla_fx.get_backend(target=target, soc="Ascend910B3", **self.options)
        torch.compile(self.run, backend=backend, dynamic=False)(*copy.deepcopy(self.given))


class Programs(NamedTuple):
    """The programs of a row. Where no rule reads plain code there is none."""

    plain: list[Callable[[], Program]]
    calls: list[Callable[[], Program]]


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


def layer(cache, step=DECODE, declared=True, **spelling):
    entry = Entry(Spelling(cache=cache, norm="fused", attend="eager", **{"sizes": REAL, **spelling}))
    given = in_type(entry.arguments(step), BF16)
    return Program(entry.build().bfloat16(), list(given), {"causal_masks": declared})


def layer_in_nz(cache, **spelling):
    return layer(cache, sizes=replace(REAL, block=128, context=256), **spelling)


def whole_pages(cache=WholePages, **spelling):
    """A prompt that fills a page of each sequence."""
    with mock.patch.dict(CACHES, paged=cache()):
        entry = Entry(replace(BF16_PAGED, sizes=replace(REAL, block=16), **spelling))
        given = in_type(entry.arguments(Step("page", 16, 32)), BF16)
        return Program(entry.build().bfloat16(), list(given), {"causal_masks": True, "absorb": "always"})


def model(names=(), tokens=1, options=None, **sizes):
    whole = int8_models.model_of(names) if names else models.model(**sizes)
    given = [models.prompt(tokens), models.static_cache(models.model(**sizes))]
    return Program(lambda ids, cache: whole(ids, past_key_values=cache).last_hidden_state, given, options or {})


def small(module, kind):
    """A layer whose sizes are the module's own numbers."""
    return Program(kind(BF16), list(module.given(BF16)))


class Tiled(tiled_prologs.Tiled):
    rank = 512


def coded(kind):
    layer = kind()
    return Program(layer, list(coded_pages.inputs(layer)), {"causal_masks": True})


def heads(tokens, kind=Gqa, given=arguments):
    sizes = sized(tokens, 128, batch=2)
    return Program(kind(sizes).to(BF16), list(given(sizes, BF16)))


def pages_of_heads(sizes, dtype):
    return heads_first(arguments(sizes, dtype))


def codes_of_heads(sizes, dtype):
    return in_codes(arguments(sizes, dtype))


def keys_of_heads(kind):
    sizes = key_value_caches.Sizes(width=192, rotary=64, columns=128, block=PAGE, hidden=256)
    given = key_value_caches.arguments(sizes, BF16)
    return Program(kind(sizes).to(BF16), list(given), {"cann": RELEASES[2]})


def log_sums(tokens):
    given = over_pages.arguments(BF16, sizes=(512, 64), block=PAGE, tokens=tokens)
    return Program(over_pages.Attention(), list(given))


# --- calls -----------------------------------------------------------------------------------------------------------


def call(operator, given, *, is_host=False, backend=None, **modes):
    """A call whose caches are written back."""
    entry = catalogue()[operator]
    overload = entry.host if is_host else entry.overload
    names = [argument.name for argument in overload._schema.arguments]
    results = [result.name.removesuffix("_out") for result in overload._schema.returns]

    def run(*given):
        found = overload(*given, **modes)
        pairs = dict(zip(results, found if isinstance(found, tuple) else (found,), strict=True))
        for name, value in zip(names, given, strict=False):
            if name in pairs:
                value.copy_(pairs.pop(name))
        return list(pairs.values())

    return Program(run, list(given), backend or {})


def prolog(cache_mode, sizes=SMALL, backend=None):
    given = prolog_call("TND" if cache_mode == "BSND" else cache_mode, (5,) if cache_mode == "TND" else (B, S), sizes)
    return call("mla_prolog", given, backend=backend, cache_mode=cache_mode)


def prolog_in_blocks(cache_mode):
    given, modes = blocks_call(cache_mode)
    return call("mla_prolog_v3", given, **modes)


def int8_prolog(*modes):
    given, options = v3_call(*modes, z=SMALL)
    return call("mla_prolog_v3", given, **options)


def key_side(cache_mode, int8=False):
    return call("kv_rmsnorm_rope_cache", kv_call(cache_mode, int8=int8), cache_mode=cache_mode)


def key_side_with_v():
    given, draw = kv_call("PA"), Sampler(BF16, seed=5)
    caches = draw.normal(BLOCKS, PAGE, 2, 192), draw.normal(BLOCKS, PAGE, 2, 128)
    given[:2] = draw.normal(B, 2, S, 192), draw.gamma(192)
    given[5:] = *caches, None, None, None, None, draw.normal(B, 2, S, 128)
    return call("kv_rmsnorm_rope_cache", given, backend={"cann": RELEASES[2]}, cache_mode="PA")


def sample(operator, mode):
    """With host lists. ATB's latent attention leaves rows without a context undefined, so there each has one."""
    overload = catalogue()[operator].host
    names = [argument.name for argument in overload._schema.arguments]
    found = next(one for one in catalogue()[operator].samples(BF16) if one.mode == mode)
    given = dict(zip(names, found.args, strict=False)) | found.kwargs
    given["block_tables"] = given["block_tables"].clamp(min=0)
    least = operator == "multi_latent_attention"
    given["context_lens"] = [max(length, least) for length in given["context_lens"].tolist()]
    for name in {"q_seqlen", "q_seq_lens"} & given.keys():
        given[name] = None if given[name] is None else given[name].tolist()
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in given.items() if name not in tensors}
    return Program(lambda tensors: overload(**tensors, **numbers), [tensors])


def quantised_prolog():
    found = next(iter(catalogue()["mla_prolog_quant"].samples(BF16)))
    return call("mla_prolog_quant", found.args, **found.kwargs)


def heads_in_pages(page=(PAGE, 4), kv_heads=4, lengths=(1, 300, 128), **modes):
    draw = Sampler(BF16, seed=7)
    caches = [draw.normal(len(lengths) * BLOCKS, *page, D) for _ in range(2)]
    given = [draw.normal(3, 32, D), *caches, pages(draw, lengths), list(lengths)]
    return call("paged_attention", given, is_host=True, qk_scale=0.09, kv_head_num=kv_heads, **modes)


def compressed_heads():
    lengths = 1, 300, 128, 17, 250, 9
    return heads_in_pages((PAGE, 1), 2, lengths, compress_type="compress_type_kvhead")


# --- the rows --------------------------------------------------------------------------------------------------------

part = functools.partial


def each(function, *values):
    return [part(function, value) for value in values]


def latent(*modes):
    return each(part(sample, "multi_latent_attention"), *modes)


def per_head(*modes):
    return each(part(sample, "paged_attention"), *modes)


PAGED, UNDECLARED = part(layer, "paged"), part(layer, "paged", declared=False)
ONE_CACHE, V1 = part(layer, "combined_paged"), {"prolog": "v1"}
PROLOG = [
    Programs([PAGED, part(layer, "paged", FEW)], [part(prolog, "PA_BSND")]),
    Programs(each(layer_in_nz, "nz", "nz_one_head"), [part(prolog, "PA_NZ")]),
    Programs([whole_pages], [part(prolog_in_blocks, "PA_BLK_BSND")]),
    Programs([part(whole_pages, NzWholePages)], [part(prolog_in_blocks, "PA_BLK_NZ")]),
    Programs([part(layer, "appended")], each(prolog, "BSND", "TND")),
    Programs(
        each(model, int8_models.V32, int8_models.R1), [part(int8_prolog, 1, 0), part(int8_prolog, 2, 0)]
    ),
    Programs([part(small, packed_prologs, packed_prologs.Packed)], [part(int8_prolog, 1, 3)]),
    Programs([part(coded, coded_pages.Pages)], [part(int8_prolog, 1, 2)]),
    Programs([], [part(int8_prolog, 2, 1)]),
    Programs(
        [part(model, options=V1, hidden_size=V1_HIDDEN, num_attention_heads=V1_HEADS)],
        [part(prolog, "PA_NZ", Sizes(V1_HIDDEN, V1_HEADS), V1)],
    ),
]
KEY_SIDE = [
    Programs([part(model, tokens=20)], [part(key_side, "Norm")]),
    Programs([part(layer, "paged", query="direct")], each(key_side, "PA", "PA_BNSD")),
    Programs([part(layer_in_nz, "nz_transposed", query="direct")], [part(key_side, "PA_NZ")]),
    Programs([part(whole_pages, query="direct")], [part(key_side, "PA_BLK_BNSD")]),
    Programs([part(whole_pages, NzWholePages, query="direct")], [part(key_side, "PA_BLK_NZ")]),
    Programs([part(coded, coded_pages.Contiguous)], each(part(key_side, int8=True), "Norm", "PA", "PA_NZ")),
    Programs(each(keys_of_heads, key_value_caches.Keys, key_value_caches.Interleaved), [key_side_with_v]),
]
LATENT = [
    Programs([PAGED], latent("KROPE_CTKV, decode")),
    Programs([part(layer_in_nz, "nz")], latent("NZCACHE, decode")),
    Programs([part(layer, "paged", FEW)], latent("KROPE_CTKV, SPEC, 128 heads", "NZCACHE, SPEC, 128 heads")),
    Programs([UNDECLARED], latent("KROPE_CTKV, SPEC", "KROPE_CTKV, SPEC, mask SPEC", "NZCACHE, SPEC, MASK_FREE")),
    Programs(each(log_sums, 1, 3), latent("KROPE_CTKV, RING", "NZCACHE, RING")),
    Programs([], latent("INT8_NZCACHE, decode", "INT8_NZCACHE, SPEC")),
    Programs([], latent("INT8_NZCACHE, RING")),
    Programs([ONE_CACHE], latent("KVCACHE, decode")),
]
QUANTISED = [Programs([part(small, tiled_prologs, Tiled)], [quantised_prolog])]
PER_HEAD = [
    Programs([part(heads, 1)], [heads_in_pages]),
    Programs([part(heads, 3)], per_head("calc_type_spec, mask_type_spec")),
    Programs([], per_head("mask_type_norm, shared", "mask_type_alibi, 3-D")),
    Programs([ONE_CACHE], per_head("mla_v_head_size")),
    Programs(
        [part(heads, 1, PagesOfHeads, pages_of_heads), part(heads, 3, PagesOfHeads, pages_of_heads)],
        [part(heads_in_pages, (4, PAGE), input_layout="type_bnsd")],
    ),
    Programs([part(heads, 1, TableOfEachHead, table_of_each_head)], [compressed_heads]),
    Programs([part(heads, 1, Slopes)], per_head("compress_type_kvhead_rope")),
    Programs([part(heads, 1, LogarithmOfLength)], per_head("scale_type_logn")),
    Programs(
        [part(heads, 1, kind, codes_of_heads) for kind in (Coded, ZeroPoints)], per_head("type_dequant_fusion")
    ),
    Programs([], per_head("type_quant_qkv_offline", "type_quant_qkv_online")),
    Programs([], per_head("NZ")),
]
ROWS = [*PROLOG, *KEY_SIDE, *LATENT, *QUANTISED, *PER_HEAD]
