"""Calls of the prolog, whose results are those of the package's own operator, and their faults."""

import functools
from dataclasses import replace
from unittest import mock

import torch
from mla_fx.lowering.ascend import prolog_form
from mla_fx.lowering.ascend.operators import mla_prolog_v3
from torch import Tensor

from mla_fx.ops.emitted.mla_prolog import operator
from npu import ge_releases
from npu.calls import BLOCKS, PAGE, SMALL, D, Sizes, blocks_call, v3_call
from npu.lowered import A2, Call
from npu.planted import arguments, moved, replaced, results
from npu.vendor_calls import NUMBERS

KERNEL = "MlaPrologV3"
SQUARE = Sizes(2048, 4, 2048)  # weight_dq has as many columns as rows, which the newest release takes
LAYS_OUT = replace(A2, cann="9.1.0", hoists=True)
CALLS = {
    "plain": lambda: v3_call(0, 0, z=SMALL),
    "nz": lambda: v3_call(0, 0, "PA_NZ", z=SMALL),
    "blocks": blocks_call,
    "nz blocks": lambda: blocks_call("PA_BLK_NZ"),
    "int8 latents": lambda: v3_call(1, 0, z=SMALL),
    "int8 caches": lambda: v3_call(1, 2, z=SMALL),
    "int8 nz caches": lambda: v3_call(1, 2, "PA_NZ", z=SMALL),
    "int8": lambda: v3_call(2, 0, z=SMALL),
    "int8 queries": lambda: v3_call(2, 1, z=SMALL),
    "packed": lambda: v3_call(1, 3, z=SMALL),
}


LAID_OUT = {
    "square weights": lambda: v3_call(0, 0, z=SQUARE),
    "halves": lambda: with_halves(*v3_call(0, 0, z=SMALL)),
}
"""Their weights are laid out by the lowering, which a graph does before it runs."""


def with_halves(args, options):
    return args, options | {"rope_layout": "half_half"}


def run(name, how):
    """Products of reordered weights take their sums in another order, so that the last bit may differ."""
    args, options = (CALLS | LAID_OUT)[name]()
    surface, close = LAYS_OUT if name in LAID_OUT else A2, 2**-7 if name == "halves" else 0
    call = Call("mla_prolog_v3", args, options | NUMBERS | {"query_norm_flag": True}, surface)
    with mock.patch.object(ge_releases, "RELEASE", surface.cann):
        torch.testing.assert_close(how(call), call.wanted(), rtol=close, atol=close)


# --- what is planted ----------------------------------------------------------------------------------------------

changed, found = (functools.partial(kind, mla_prolog_v3) for kind in (arguments, results))
own = functools.partial(replaced, operator)  # what the kernel is compared with


def ones(x: Tensor) -> Tensor:
    return torch.full_like(x, 1.0)


def weights(change):
    """Matrices are others where they are laid out."""
    return replaced(mla_prolog_v3, "in_fractals", lambda whole: lambda surface, weight: whole(surface, change(weight)))


def with_scales(dim, count):
    """In packed rows scales, which are their last 16 bytes, are those of the tile or row `count` further."""

    def change(a, all):
        codes, scales = all[5].split([all[5].shape[-1] - 16, 16], -1)
        return *all[:5], torch.cat((codes, moved(scales, count, dim)), -1), all[6]

    return change


def with_arguments(change):
    """The same, of arguments that are functions of the right ones."""
    return lambda whole: lambda *args: whole(*change(*args))


def without_rescaling(whole):
    def fault(query, query_rope, scale):
        codes, _, query_scale = whole(query, query_rope, scale)
        return codes, query_rope, query_scale

    return fault


def scales_before_keys(whole):
    """In packed rows."""

    def fault(latent, key_rope, alpha):
        codes, keys, scales = whole(latent, key_rope, alpha).split([512, 128, 16], -1)
        return torch.cat((codes, scales, keys), -1)

    return fault


FAULTS = {
    "epsilons of the two norms swapped": (
        "plain",
        changed(lambda a: {"rmsnorm_epsilon_cq": a.rmsnorm_epsilon_ckv, "rmsnorm_epsilon_ckv": a.rmsnorm_epsilon_cq}),
    ),
    "both epsilons lost": ("plain", changed(lambda a: {"rmsnorm_epsilon_cq": 1e-5, "rmsnorm_epsilon_ckv": 1e-5})),
    "the query's epsilon lost": ("plain", changed(lambda a: {"rmsnorm_epsilon_cq": 1e-5})),
    "the keys' epsilon lost": ("plain", changed(lambda a: {"rmsnorm_epsilon_ckv": 1e-5})),
    "qc_qr_scale lost": ("plain", changed(lambda a: {"qc_qr_scale": 1.0})),
    "kc_scale lost": ("plain", changed(lambda a: {"kc_scale": 1.0})),
    "latents of keys normed by the weight of queries": (
        "plain",
        changed(lambda a: {"rmsnorm_gamma_ckv": a.rmsnorm_gamma_cq[:512]}),
    ),
    "sin and cos swapped": ("plain", changed(lambda a: {"rope_sin": a.rope_cos, "rope_cos": a.rope_sin})),
    "tables of the token before": ("plain", changed(lambda a: {"rope_sin": moved(a.rope_sin, 1, 1)})),
    "second halves of tables repeat the first": (
        "plain",
        changed(lambda a: {"rope_cos": torch.cat((a.rope_cos[..., :32], a.rope_cos[..., :32]), -1)}),
    ),
    "heads of weight_uk in another order": ("plain", changed(lambda a: {"weight_uk": moved(a.weight_uk, 1, 0)})),
    "slots off by one": ("plain", changed(lambda a: {"cache_index": a.cache_index + 1})),
    "rows in another page": ("plain", changed(lambda a: {"cache_index": (a.cache_index + PAGE) % (BLOCKS * PAGE)})),
    "slots of the tokens swapped": ("plain", changed(lambda a: {"cache_index": moved(a.cache_index, 1, 1)})),
    "a token without a slot stored in the first": (
        "plain",
        changed(lambda a: {"cache_index": a.cache_index.clamp(min=0)}),
    ),
    "a negative block stored in the first": ("blocks", changed(lambda a: {"cache_index": a.cache_index.clamp(min=0)})),
    "a negative block counted from the end": ("blocks", changed(lambda a: {"cache_index": a.cache_index % BLOCKS})),
    "pages in FRACTAL_NZ as plain ones": ("nz", changed(lambda a: {"cache_mode": "PA_BSND"})),
    "blocks in FRACTAL_NZ as plain ones": ("nz blocks", changed(lambda a: {"cache_mode": "PA_BLK_BSND"})),
    "scales of another head": (
        "int8 latents",
        changed(lambda a: {"dequant_scale_w_uq_qr": moved(a.dequant_scale_w_uq_qr, D + 64)}),
    ),
    "scales lost": ("int8 latents", changed(lambda a: {"dequant_scale_w_uq_qr": ones(a.dequant_scale_w_uq_qr)})),
    "scales of another column of the query": (
        "int8",
        changed(lambda a: {"dequant_scale_w_dq": moved(a.dequant_scale_w_dq, 1)}),
    ),
    "smooth scales lost": ("int8 latents", changed(lambda a: {"smooth_scales_cq": None})),
    "smooth scales that no weight was divided by": (
        "int8 latents",
        changed(lambda a: {"smooth_scales_cq": a.smooth_scales_cq * a.rmsnorm_gamma_cq.float()}),
    ),
    "scales of another token": ("int8", changed(lambda a: {"dequant_scale_x": moved(a.dequant_scale_x, 1, 0)})),
    "scales of another column of keys": (
        "int8",
        changed(lambda a: {"dequant_scale_w_dkv_kr": moved(a.dequant_scale_w_dkv_kr, 1)}),
    ),
    "the scale of the cache lost": ("int8 queries", changed(lambda a: {"quant_scale_ckv": ones(a.quant_scale_ckv)})),
    "the scale of the cache inverted": (
        "int8 queries",
        changed(lambda a: {"quant_scale_ckv": a.quant_scale_ckv.reciprocal()}),
    ),
    "scales of another column of the cache": (
        "int8 caches",
        changed(lambda a: {"quant_scale_ckv": moved(a.quant_scale_ckv, 1)}),
    ),
    "scales of rotary keys lost": ("int8 caches", changed(lambda a: {"quant_scale_ckr": ones(a.quant_scale_ckr)})),
    "k_nope_clip_alpha lost": ("packed", changed(lambda a: {"k_nope_clip_alpha": ones(a.k_nope_clip_alpha)})),
    # what the kernel refuses
    "ends of sequences that are lengths": (
        "blocks",
        changed(lambda a: {"actual_seq_len": torch.cat((a.actual_seq_len[:1], a.actual_seq_len.diff()))}),
        r"actual_seq_len is \[3, 130, 1\]; it is ends that grow, the last of them 134",
    ),
    "blocks given as their first slots": (
        "blocks",
        changed(lambda a: {"cache_index": a.cache_index * PAGE}),
        "is behind the end of a cache of 512",
    ),
    "a packed cache said to be plain int8": (
        "packed",
        changed(lambda a: {"kv_cache_quant_mode": 0}),
        r"kinds of quantisation is \(1, 0, 656\)",
    ),
    "another cache mode for packed rows": (
        "packed",
        changed(lambda a: {"cache_mode": "PA_NZ"}),
        "cache_mode is 'PA_NZ' in kv_cache_quant_mode 3",
    ),
    "the query's mode forgotten": (
        "int8 queries",
        changed(lambda a: {"query_quant_mode": 0}),
        "query_quant_mode is 0",
    ),
    # weights, which are laid out before the call
    "a square weight transposed": ("square weights", weights(lambda w: w.t() if w.shape[0] == w.shape[1] else w)),
    "rotary columns of the query first": (
        "square weights",
        weights(lambda w: moved(w, 64) if w.shape[1] == 4 * 192 else w),
    ),
    "halves that are not reordered": (
        "halves",
        replaced(prolog_form, "halves_interleaved", lambda whole: lambda weight, width: weight),
    ),
    "weights in ND": (
        "square weights",
        replaced(mla_prolog_v3, "in_fractals", lambda whole: lambda surface, weight: weight.contiguous()),
        "MlaPrologV3 reads weight_dq in FRACTAL_NZ",
    ),
    # what is made of its results
    "the latents as they were before": ("plain", found(lambda a, all: (*all[:5], a.kv_cache.clone(), all[6]))),
    "rotary keys of another row": ("plain", found(lambda a, all: (*all[:6], moved(all[6], 1, 1)))),
    "queries of another head": ("plain", found(lambda a, all: (moved(all[0], 1, -2), *all[1:]))),
    "the query's norm scaled": ("int8 latents", found(lambda a, all: (*all[:4], all[4] * 127, *all[5:]))),
    "queries unscaled": ("int8 queries", found(lambda a, all: (*all[:2], ones(all[2]), *all[3:]))),
    "scales of the next tile in packed rows": ("packed", found(with_scales(-1, 4))),
    "scales of another row in packed rows": ("packed", found(with_scales(1, 1))),
    # in the package's own operator
    "the mean of norms is a sum": (
        "plain",
        own("wide_rms_norm", with_arguments(lambda x, gamma, epsilon, *rest: (x, gamma, epsilon * x.shape[-1], *rest))),
    ),
    "halves read in place of neighbours": (
        "plain",
        own("rope", with_arguments(lambda x, cos, sin, layout: (x, cos, sin, "half_half"))),
    ),
    "neighbours written in place of halves": (
        "plain",
        own("rope", with_arguments(lambda x, cos, sin, layout: (x, cos, sin, "interleave_interleave"))),
    ),
    "rotated the other way": ("plain", own("rope", with_arguments(lambda x, cos, sin, layout: (x, cos, -sin, layout)))),
    "codes truncated": ("int8 caches", own("i8_trunc", with_arguments(lambda x: (x.trunc(),)))),
    "codes of queries rounded once": ("int8 queries", own("i8_half_round", lambda whole: operator.i8_trunc)),
    "query_rope not divided by scales": ("int8 queries", own("quantized_query", without_rescaling)),
    "scales before keys in packed rows": ("packed", own("packed_rows", scales_before_keys)),
    "sequences that share their blocks": (
        "blocks",
        own(
            "ragged_page_slots",
            lambda whole: lambda starts, ends, tokens, size: starts.repeat_interleave(size)[:tokens].contiguous(),
        ),
    ),
}
