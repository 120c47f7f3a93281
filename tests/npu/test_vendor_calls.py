"""The user's calls, lowered to the vendor's operators: results and written caches are those of `mla_fx`' operators,
at the sizes of DeepSeek-V3."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.ascend import prolog_form

from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments
from mla_fx.ops.vendor.mla_prolog_v3.samples import integers, scale
from npu.ge_ops import prolog_rules
from npu.lowered import A2, Call

pytestmark = pytest.mark.campaign  # every mode at full size; tests/npu/test_user_calls.py has each call once
BF16 = torch.bfloat16
HE, HCQ, N, D, HCKV, DR = 7168, 1536, 128, 128, 512, 64
B, S, BLOCKS, PAGE = 2, 3, 4, 128


def check(converted, kernel, operator, args, surface=A2, **options):
    """Bit by bit: the interpreter's kernels are the operators of the vendor's own interface."""
    call = Call(operator, args, options, surface)
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=0, atol=0)
    assert converted.types(converted.graphs[0]).count(kernel) == 1


# --- mla_prolog ---------------------------------------------------------------------------------------------------


@functools.cache
def weights(quantised=0):
    """Those of one layer; 1: weight_uq_qr is int8; 2: what meets the tokens too."""
    draw = Sampler(BF16)

    def weight(rows, columns, int8):
        return integers(draw, rows, columns) if int8 else draw.weight(rows, columns, fan_in=rows)

    return (
        weight(HE, HCQ, quantised == 2),
        weight(HCQ, N * (D + DR), quantised > 0),
        draw.weight(N, D, HCKV, fan_in=D),
        weight(HE, HCKV + DR, quantised == 2),
        draw.gamma(HCQ),
        draw.gamma(HCKV),
    )


def prolog_call(cache_mode, tokens=(B, S)):
    """Arguments of mla_prolog; the first token has no place."""
    draw = Sampler(BF16, seed=1)
    index = draw.slots(torch.Size(tokens).numel(), BLOCKS * PAGE, skip=1).view(tokens)
    fresh = cache_mode == "TND"
    lead = (*tokens, 1) if fresh else (BLOCKS, PAGE, 1)
    tables = draw.tables(*tokens, DR)
    caches = draw.normal(*lead, HCKV), draw.normal(*lead, DR)
    return [draw.normal(*tokens, HE), *weights(), *tables, None if fresh else index, *caches]


PROLOGS = {
    "pages": {"cache_mode": "PA_BSND"},
    "NZ pages": {"cache_mode": "PA_NZ"},
    "merged tokens": {"cache_mode": "PA_BSND", "tokens": (5,)},
    "merged fresh rows": {"cache_mode": "TND", "tokens": (5,)},
}


@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in PROLOGS.items()])
def test_mla_prolog(converted, given):
    args = prolog_call(**given)
    options = {"cache_mode": given["cache_mode"], "rmsnorm_epsilon_cq": 1e-3, "qc_qr_scale": 1.25, "kc_scale": 0.75}
    check(converted, "MlaPrologV3", "mla_prolog", args, **options)


@pytest.mark.parametrize("int8_caches", [False, True])
def test_mla_prolog_with_int8_weights(converted, int8_caches):
    draw = Sampler(BF16, seed=2)
    args = prolog_call("PA_BSND")
    args[1:7] = weights(quantised=1)
    scales = [None, None, scale(draw, N * (D + DR), HCQ**-0.5 / 40), None, None, None, scale(draw, HCQ, 1)]
    if int8_caches:
        args[10:12] = integers(draw, *args[10].shape), integers(draw, *args[11].shape)
        scales[4:6] = scale(draw, HCKV, 35), scale(draw, DR, 35)
    check(converted, "MlaPrologV3", "mla_prolog", [*args, *scales])


def test_weights_for_halves_give_the_same_to_a_kernel_that_reads_neighbours():
    """Reordered weights with interleaved columns are the given ones with halves. In float64, because a matrix in
    another layout sums in another order."""
    heads, args = 4, prolog_call("PA_BSND")
    args[2], args[3] = args[2][:, : heads * (D + DR)], args[3][:heads]
    args = [arg.double() if arg.is_floating_point() else arg for arg in args]
    args[4] = args[4].T.contiguous().T  # as nn.Linear keeps it
    wanted = torch.ops.mla_fx.mla_prolog(*args, rope_layout="half_half")
    reordered = prolog_form.interleaved(Arguments(*args, rope_layout="half_half"))
    args[2], args[4] = reordered.weight_uq_qr, reordered.weight_dkv_kr
    torch.testing.assert_close(torch.ops.mla_fx.mla_prolog(*args), wanted, rtol=1e-10, atol=1e-10)


# --- mla_prolog_v3 ------------------------------------------------------------------------------------------------


def v3_call(weight_quant_mode, kv_cache_quant_mode, cache_mode="PA_BSND"):
    """Arguments of mla_prolog_v3 in its modes; the first token has no place."""
    draw, packed = Sampler(BF16, seed=3), kv_cache_quant_mode == 3
    some, full = weight_quant_mode > 0, weight_quant_mode == 2
    token_x, *_, index, kv_cache, kr_cache = prolog_call(cache_mode)
    if kv_cache_quant_mode:
        kv_cache = integers(draw, *kv_cache.shape[:-1], 656 if packed else HCKV)
    if kv_cache_quant_mode == 2:
        kr_cache = integers(draw, *kr_cache.shape)
    args = [
        integers(draw, B, S, HE) if full else token_x,
        *weights(weight_quant_mode),
        *draw.tables(B, S, DR),
        kv_cache,
        draw.normal(0) if packed else kr_cache,
        index,
        scale(draw, B * S, 1 / 40).T if full else None,
        scale(draw, HCQ, HE**-0.5 / 40) if full else None,
        scale(draw, N * (D + DR), HCQ**-0.5 / 40) if some else None,
        scale(draw, HCKV + DR, HE**-0.5 / 40) if full else None,
        {1: torch.tensor([35.0]), 2: scale(draw, HCKV, 35)}.get(kv_cache_quant_mode),
        scale(draw, DR, 35) if kv_cache_quant_mode == 2 else None,
        scale(draw, HCQ, 1) if some else None,
        None,
        torch.tensor([0.85]) if packed else None,
    ]
    modes = {
        "cache_mode": cache_mode,
        "weight_quant_mode": weight_quant_mode,
        "kv_cache_quant_mode": kv_cache_quant_mode,
        "query_quant_mode": int(kv_cache_quant_mode == 1),
        "ckvkr_repo_mode": int(packed),
        "quant_scale_repo_mode": int(packed),
    }
    return args, modes


@pytest.mark.parametrize("modes", [(0, 0), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)], ids=str)
def test_mla_prolog_v3(converted, modes):
    args, options = v3_call(*modes)
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, **options, qc_qr_scale=1.25, query_norm_flag=True)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_mla_prolog_v3_with_blocks_of_sequences_of_any_length(converted, cache_mode, as_tensor):
    """Three sequences; the second fills more than a page, and the first page is skipped."""
    lengths, draw = [3, 133, 134], Sampler(BF16, seed=8)
    args = prolog_call("PA_BSND", tokens=(134,))
    args = [*args[:9], *args[10:], draw.slots(4, BLOCKS, skip=1), *[None] * 7]
    args.append(torch.tensor(lengths) if as_tensor else lengths)
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, cache_mode=cache_mode)


def test_mla_prolog_v3_without_what_it_is_not_asked_for(converted):
    args, options = v3_call(1, 0, "PA_NZ")
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, **options)


# --- kv_rmsnorm_rope_cache ----------------------------------------------------------------------------------------

KV_MODES = ["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]


def kv_call(cache_mode, int8=False, shared=False):
    """Arguments of kv_rmsnorm_rope_cache; the first token, or page, has no place. kv is not contiguous."""
    draw = Sampler(BF16, seed=4)
    norm, rows = cache_mode == "Norm", 1 if shared else B
    blocked, slots = "BLK" in cache_mode, BLOCKS * PAGE
    index = draw.slots(B, BLOCKS, skip=1) * PAGE if blocked else draw.slots(rows * S, slots, skip=1)
    lead = (B, 1, BLOCKS * PAGE) if norm else (BLOCKS, PAGE, 1)
    caches = [integers(draw, *lead, width) if int8 else draw.normal(*lead, width) for width in (DR, HCKV)]
    scales = [scale(draw, width, 40).squeeze(0) for width in (DR, HCKV)] if int8 else [None, None]
    kv = draw.normal(B, 1, S, 100 + HCKV + DR)[..., 100:]
    tables = draw.tables(rows, 1, S, DR)
    return [kv, draw.gamma(HCKV), *tables, index.view(rows, S) if norm else index, *caches, *scales]


@pytest.mark.parametrize("cache_mode", KV_MODES)
def test_kv_rmsnorm_rope_cache(converted, cache_mode):
    args = kv_call(cache_mode)
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, cache_mode=cache_mode, epsilon=1e-3)


def test_kv_rmsnorm_rope_cache_of_rows_that_are_the_cache(converted):
    args = kv_call("Norm")
    args[4:7] = None, *(torch.empty(B, 1, S, width, dtype=BF16) for width in (DR, HCKV))
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, cache_mode="BNSD")


@pytest.mark.parametrize("cache_mode", KV_MODES)
def test_kv_rmsnorm_rope_cache_in_int8(converted, cache_mode):
    args = kv_call(cache_mode, int8=True)
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, cache_mode=cache_mode)


def test_kv_rmsnorm_rope_cache_with_positions_and_tables_for_all_sequences(converted):
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", kv_call("Norm", shared=True))


@pytest.mark.parametrize("cache_mode", KV_MODES)
def test_kv_rmsnorm_rope_cache_with_v(converted, monkeypatch, cache_mode):
    """Its key, normalised whole and rotated in part, is 192 wide."""
    monkeypatch.setattr(prolog_rules, "RELEASE", "9.0.0")
    surface = replace(A2, cann="9.0.0")
    draw, heads = Sampler(BF16, seed=5), 2
    args = kv_call(cache_mode)
    lead = (B, heads, BLOCKS * PAGE) if cache_mode == "Norm" else (BLOCKS, PAGE, heads)
    args[:2] = draw.normal(B, heads, S, 192), draw.gamma(192)
    caches = draw.normal(*lead, 192), draw.normal(*lead, 128)
    args[5:] = *caches, None, None, None, None, draw.normal(B, heads, S, 128)
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, surface, cache_mode=cache_mode)


# --- attention over pages -----------------------------------------------------------------------------------------


def pages(draw, lengths):
    """Different blocks for the contexts of all sequences."""
    return draw.slots(len(lengths) * BLOCKS, len(lengths) * BLOCKS).view(len(lengths), BLOCKS).int()


def check_attention(converted, operator, args, **options):
    """To two ulps of the largest results: weights are rounded against the largest of other keys."""
    call = Call(operator, args, options)
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=1e-2, atol=4e-3)
    assert converted.types(converted.graphs[0]).count("FusedInferAttentionScore") == 1


def in_nz(cache):
    """Pages of FRACTAL_NZ as ATB shapes them."""
    return cache.squeeze(2).unflatten(-1, (-1, 16)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
@pytest.mark.parametrize("heads, steps", [(16, None), (128, None), (128, [3, 1, 2])], ids=str)
@pytest.mark.parametrize("as_tensors", [False, True], ids=["lists", "tensors"])
def test_multi_latent_attention(converted, cache_mode, heads, steps, as_tensors):
    draw, lengths = Sampler(BF16, seed=6), [0 if steps is None else 3, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 1, width) for width in (HCKV, DR)]
    caches = [in_nz(cache) if cache_mode == "nzcache" else cache for cache in caches]
    rows = len(lengths) if steps is None else sum(steps)
    queries = [draw.normal(rows, heads, width) for width in (HCKV, DR)]
    context, counts = (torch.tensor(given) if given and as_tensors else given for given in (lengths, steps))
    args = [*queries, *caches, pages(draw, lengths), context, None, counts]
    options = {"cache_mode": cache_mode, "calc_type": "calc_type_undefined" if steps is None else "calc_type_spec"}
    check_attention(converted, "multi_latent_attention", args, qk_scale=0.07, **options)


def test_paged_attention(converted):
    draw, lengths = Sampler(BF16, seed=7), [1, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 4, D) for _ in range(2)]
    args = [draw.normal(len(lengths), 32, D), *caches, pages(draw, lengths), lengths]
    check_attention(converted, "paged_attention", args, qk_scale=0.09, kv_head_num=4)
