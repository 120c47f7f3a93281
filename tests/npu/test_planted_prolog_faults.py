"""Faults planted into the prolog, one at a time: the results of test_vendor_calls.py differ, or the kernel refuses."""

from __future__ import annotations

import pytest
import torch
from mla_fx.lowering.ascend.operators import mla_prolog_v3
from torch import Tensor

import mla_fx
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.mla_prolog import operator
from npu import ge_releases
from npu.calls import BLOCKS, PAGE, SMALL, D, Sizes, prolog_call, v3_call, weights
from npu.planted import caught_by_numbers, change_call, change_results
from npu.vendor_calls import NUMBERS, check


def blocks_call(cache_mode="PA_BLK_BSND"):
    """Three sequences; the second fills a block and a part of another, and the first block is skipped."""
    args = prolog_call("PA_BSND", tokens=(134,), z=SMALL)
    blocks = Sampler(torch.bfloat16, seed=8).slots(4, BLOCKS, skip=1)
    return [*args[:9], *args[10:], blocks, *[None] * 7, torch.tensor([3, 133, 134])], {"cache_mode": cache_mode}


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


def compare(converted, name):
    args, options = CALLS[name]()
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, **options, **NUMBERS, query_norm_flag=True)


@pytest.mark.parametrize("name", CALLS)
def test_no_fault(converted, name):
    compare(converted, name)


# --- the call that is made ----------------------------------------------------------------------------------------


def moved(x: Tensor, count: int, dim: int = -1) -> Tensor:
    """Each element at the place of another, `count` further."""
    size = x.shape[dim]
    return torch.cat((x.narrow(dim, size - count, count), x.narrow(dim, 0, size - count)), dim)


def ones(x: Tensor) -> Tensor:
    return torch.full_like(x, 1.0)


ARGUMENTS = {
    "epsilons of the two norms swapped": (
        "plain",
        lambda a: {"rmsnorm_epsilon_cq": a.rmsnorm_epsilon_ckv, "rmsnorm_epsilon_ckv": a.rmsnorm_epsilon_cq},
    ),
    "both epsilons lost": ("plain", lambda a: {"rmsnorm_epsilon_cq": 1e-5, "rmsnorm_epsilon_ckv": 1e-5}),
    "qc_qr_scale lost": ("plain", lambda a: {"qc_qr_scale": 1.0}),
    "kc_scale lost": ("plain", lambda a: {"kc_scale": 1.0}),
    "latents of keys normed by the weight of queries": (
        "plain",
        lambda a: {"rmsnorm_gamma_ckv": a.rmsnorm_gamma_cq[:512]},
    ),
    "sin and cos swapped": ("plain", lambda a: {"rope_sin": a.rope_cos, "rope_cos": a.rope_sin}),
    "tables of the token before": ("plain", lambda a: {"rope_sin": moved(a.rope_sin, 1, 1)}),
    "second halves of tables repeat the first": (
        "plain",
        lambda a: {"rope_cos": torch.cat((a.rope_cos[..., :32], a.rope_cos[..., :32]), -1)},
    ),
    "heads of weight_uk in another order": ("plain", lambda a: {"weight_uk": moved(a.weight_uk, 1, 0)}),
    "slots off by one": ("plain", lambda a: {"cache_index": a.cache_index + 1}),
    "slots of the tokens swapped": ("plain", lambda a: {"cache_index": moved(a.cache_index, 1, 1)}),
    "a token without a slot stored in the first": ("plain", lambda a: {"cache_index": a.cache_index.clamp(min=0)}),
    "a negative block stored in the first": ("blocks", lambda a: {"cache_index": a.cache_index.clamp(min=0)}),
    "a negative block counted from the end": (
        "blocks",
        lambda a: {"cache_index": torch.where(a.cache_index < 0, a.cache_index + BLOCKS, a.cache_index)},
    ),
    "pages in FRACTAL_NZ as plain ones": ("nz", lambda a: {"cache_mode": "PA_BSND"}),
    "blocks in FRACTAL_NZ as plain ones": ("nz blocks", lambda a: {"cache_mode": "PA_BLK_BSND"}),
    "scales of another head": (
        "int8 latents",
        lambda a: {"dequant_scale_w_uq_qr": moved(a.dequant_scale_w_uq_qr, D + 64)},
    ),
    "smooth scales lost": ("int8 latents", lambda a: {"smooth_scales_cq": None}),
    "scales of another token": ("int8", lambda a: {"dequant_scale_x": moved(a.dequant_scale_x, 1, 0)}),
    "scales of another column of keys": (
        "int8",
        lambda a: {"dequant_scale_w_dkv_kr": moved(a.dequant_scale_w_dkv_kr, 1)},
    ),
    "the scale of the cache lost": ("int8 queries", lambda a: {"quant_scale_ckv": ones(a.quant_scale_ckv)}),
    "the scale of the cache inverted": ("int8 queries", lambda a: {"quant_scale_ckv": a.quant_scale_ckv.reciprocal()}),
    "scales of another column of the cache": (
        "int8 caches",
        lambda a: {"quant_scale_ckv": moved(a.quant_scale_ckv, 1)},
    ),
    "scales of rotary keys lost": ("int8 caches", lambda a: {"quant_scale_ckr": ones(a.quant_scale_ckr)}),
    "k_nope_clip_alpha lost": ("packed", lambda a: {"k_nope_clip_alpha": ones(a.k_nope_clip_alpha)}),
}


@pytest.mark.parametrize("fault", ARGUMENTS)
def test_arguments(converted, monkeypatch, fault):
    name, change = ARGUMENTS[fault]
    change_call(monkeypatch, mla_prolog_v3, change)
    with caught_by_numbers():
        compare(converted, name)


REFUSED = {
    "ends of sequences that are lengths": (
        "blocks",
        lambda a: {"actual_seq_len": torch.cat((a.actual_seq_len[:1], a.actual_seq_len.diff()))},
        r"actual_seq_len is \[3, 130, 1\]; it is ends that grow, the last of them 134",
    ),
    "blocks given as their first slots": (
        "blocks",
        lambda a: {"cache_index": a.cache_index * PAGE},
        "is behind the end of a cache of 512",
    ),
    "a packed cache said to be plain int8": (
        "packed",
        lambda a: {"kv_cache_quant_mode": 0},
        r"kinds of quantisation is \(1, 0, 656\)",
    ),
    "another cache mode for packed rows": (
        "packed",
        lambda a: {"cache_mode": "PA_NZ"},
        "cache_mode is 'PA_NZ' in kv_cache_quant_mode 3",
    ),
    "the query's mode forgotten": ("int8 queries", lambda a: {"query_quant_mode": 0}, "query_quant_mode is 0"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_arguments_that_the_kernel_refuses(converted, monkeypatch, fault):
    name, change, sentence = REFUSED[fault]
    change_call(monkeypatch, mla_prolog_v3, change)
    with pytest.raises(ValueError, match=sentence):
        compare(converted, name)


# --- weights, which are laid out before the call ------------------------------------------------------------------

SQUARE = Sizes(2048, 4, 2048)  # weight_dq has as many columns as rows
WIDE = "9.1.0"  # the release that takes them


class Prolog(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(weights(z=SQUARE))

    def forward(self, token_x, sin, cos, index, kv_cache, kr_cache):
        return torch.ops.mla_fx.mla_prolog(token_x, *self.weights, sin, cos, index, kv_cache, kr_cache)


def compare_layers():
    token_x, *_, sin, cos, index, kv_cache, kr_cache = prolog_call("PA_BSND", z=SQUARE)
    layer, given = Prolog().requires_grad_(False), (token_x, sin, cos, index, kv_cache, kr_cache)
    run = torch.compile(layer, backend=mla_fx.get_backend(target="ge", soc="Ascend910B3", cann=WIDE), dynamic=False)
    torch.testing.assert_close(run(*given), layer(*given), rtol=0, atol=0)


def transposed(weight):
    return weight.t() if weight.shape[0] == weight.shape[1] else weight


def rotary_columns_first(weight):
    return moved(weight, 64) if weight.shape[1] == 4 * 192 else weight


@pytest.mark.parametrize("fault", [None, transposed, rotary_columns_first])
def test_weights(monkeypatch, fault):
    monkeypatch.setattr(ge_releases, "RELEASE", WIDE)
    if fault is None:
        compare_layers()
        return
    whole = mla_prolog_v3.in_fractals
    monkeypatch.setattr(mla_prolog_v3, "in_fractals", lambda surface, weight: whole(surface, fault(weight)))
    with caught_by_numbers():
        compare_layers()


# --- what is made of its results ----------------------------------------------------------------------------------


def stale(a, results):
    """The cache as it was before."""
    return *results[:5], a.kv_cache.clone(), results[6]


def rows_moved(a, results):
    return *results[:6], moved(results[6], 1, 1)


def query_norm_scaled(a, results):
    return *results[:4], results[4] * 127, *results[5:]


def heads_moved(a, results):
    return moved(results[0], 1, -2), *results[1:]


def queries_unscaled(a, results):
    return *results[:2], torch.full_like(results[2], 1.0), *results[3:]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plain", stale),
        ("plain", rows_moved),
        ("plain", heads_moved),
        ("int8 latents", query_norm_scaled),
        ("int8 queries", queries_unscaled),
    ],
)
def test_results(converted, monkeypatch, name, fault):
    change_results(monkeypatch, mla_prolog_v3, fault)
    with caught_by_numbers():
        compare(converted, name)


# --- the package's own operator, which the kernel is compared with ------------------------------------------------


def sums_with(change):
    """The same, of arguments that are functions of the right ones."""
    return lambda whole: lambda *args: whole(*change(*args))


def truncated(whole):
    return lambda x: whole(x.trunc())


def without_rescaling(whole):
    def fault(query, query_rope, scale):
        codes, _, query_scale = whole(query, query_rope, scale)
        return codes, query_rope, query_scale

    return fault


def in_order_of(whole):
    """Scales before rotary keys in packed rows."""

    def fault(latent, key_rope, alpha):
        codes, keys, scales = whole(latent, key_rope, alpha).split([512, 128, 16], -1)
        return torch.cat((codes, scales, keys), -1)

    return fault


def summed(x, gamma, epsilon, *rest):
    return x, gamma, epsilon * x.shape[-1], *rest


OPERATOR = {
    "the mean of norms is a sum": ("plain", "wide_rms_norm", sums_with(summed)),
    "halves read in place of neighbours": (
        "plain",
        "rope",
        sums_with(lambda x, cos, sin, layout: (x, cos, sin, "half_half")),
    ),
    "neighbours written in place of halves": (
        "plain",
        "rope",
        sums_with(lambda x, cos, sin, layout: (x, cos, sin, "interleave_interleave")),
    ),
    "rotated the other way": ("plain", "rope", sums_with(lambda x, cos, sin, layout: (x, cos, -sin, layout))),
    "codes truncated": ("int8 caches", "i8_trunc", truncated),
    "codes of queries rounded once": ("int8 queries", "i8_half_round", lambda whole: operator.i8_trunc),
    "query_rope not divided by scales": ("int8 queries", "quantized_query", without_rescaling),
    "scales before keys in packed rows": ("packed", "packed_rows", in_order_of),
    "sequences that share their blocks": (
        "blocks",
        "ragged_page_slots",
        lambda whole: lambda starts, ends, tokens, size: starts.repeat_interleave(size)[:tokens].contiguous(),
    ),
}


@pytest.mark.parametrize("fault", OPERATOR)
def test_operator(converted, monkeypatch, fault):
    name, function, plant = OPERATOR[fault]
    monkeypatch.setattr(operator, function, plant(getattr(operator, function)))
    with caught_by_numbers():
        compare(converted, name)
