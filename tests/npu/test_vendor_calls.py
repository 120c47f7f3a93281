"""The user's calls, lowered to the vendor's operators: results and written caches are those of `mla_fx`' operators."""

from dataclasses import replace

import pytest
import torch
from mla_fx.lowering.ascend import prolog_form

from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments
from mla_fx.ops.emitted.mla_prolog.samples import integers, scale
from npu import ge_releases
from npu.calls import (
    BF16,
    BLOCKS,
    DR,
    FULL,
    HCKV,
    PAGE,
    SMALL,
    B,
    D,
    S,
    blocks_call,
    in_nz,
    kv_call,
    pages,
    prolog_call,
    v3_call,
    weights,
)
from npu.lowered import A2, Call
from npu.vendor_calls import NUMBERS, check

SIZES = pytest.mark.parametrize("z", [SMALL, pytest.param(FULL, marks=pytest.mark.campaign)], ids=["small", "full"])


# --- mla_prolog ---------------------------------------------------------------------------------------------------


PROLOGS = {
    "pages": {"cache_mode": "PA_BSND"},
    "NZ pages": {"cache_mode": "PA_NZ"},
    "merged tokens": {"cache_mode": "PA_BSND", "tokens": (5,)},
    "merged fresh rows": {"cache_mode": "TND", "tokens": (5,)},
}


@SIZES
@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in PROLOGS.items()])
def test_mla_prolog(converted, given, z):
    args = prolog_call(**given, z=z)
    check(converted, "MlaPrologV3", "mla_prolog", args, cache_mode=given["cache_mode"], **NUMBERS)


@SIZES
@pytest.mark.parametrize("int8_caches", [False, True])
def test_mla_prolog_with_int8_weights(converted, int8_caches, z):
    draw = Sampler(BF16, seed=2)
    args = prolog_call("PA_BSND", z=z)
    args[1:7] = weights(quantised=1, z=z)
    scales = [None, None, scale(draw, z.n * (D + DR), z.hcq**-0.5 / 40), None, None, None, scale(draw, z.hcq, 1)]
    if int8_caches:
        args[10:12] = integers(draw, *args[10].shape), integers(draw, *args[11].shape)
        scales[4:6] = scale(draw, HCKV, 35), scale(draw, DR, 35)
    check(converted, "MlaPrologV3", "mla_prolog", [*args, *scales])


def test_weights_for_halves_give_the_same_to_a_kernel_that_reads_neighbours():
    """Reordered weights with interleaved columns are the given ones with halves. In float64, because a matrix in
    another layout sums in another order."""
    args = prolog_call("PA_BSND", z=SMALL)
    args = [arg.double() if arg.is_floating_point() else arg for arg in args]
    args[4] = args[4].T.contiguous().T  # as nn.Linear keeps it
    wanted = torch.ops.mla_fx.mla_prolog(*args, rope_layout="half_half")
    reordered = prolog_form.interleaved(Arguments(*args, rope_layout="half_half"))
    args[2], args[4] = reordered.weight_uq_qr, reordered.weight_dkv_kr
    torch.testing.assert_close(torch.ops.mla_fx.mla_prolog(*args), wanted, rtol=1e-10, atol=1e-10)


# --- mla_prolog_v3 ------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("modes", [(0, 0), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 3)], ids=str)
def test_mla_prolog_v3(converted, modes, z):
    args, options = v3_call(*modes, z=z)
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, **options, **NUMBERS, query_norm_flag=True)


@SIZES
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
@pytest.mark.parametrize("cache_mode", ["PA_BLK_BSND", "PA_BLK_NZ"])
def test_mla_prolog_v3_with_blocks_of_sequences_of_any_length(converted, cache_mode, as_tensor, z):
    *args, ends = blocks_call(cache_mode, z)[0]
    args.append(ends if as_tensor else ends.tolist())
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, cache_mode=cache_mode)


@SIZES
def test_mla_prolog_v3_without_what_it_is_not_asked_for(converted, z):
    args, options = v3_call(1, 0, "PA_NZ", z)
    check(converted, "MlaPrologV3", "mla_prolog_v3", args, **options)


# --- kv_rmsnorm_rope_cache ----------------------------------------------------------------------------------------

KV_MODES = ["Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"]


@pytest.mark.parametrize("cache_mode", KV_MODES)
def test_kv_rmsnorm_rope_cache(converted, cache_mode):
    args = kv_call(cache_mode)
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, cache_mode=cache_mode, epsilon=0.1)


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
    monkeypatch.setattr(ge_releases, "RELEASE", "9.0.0")
    surface = replace(A2, cann="9.0.0")
    draw, heads = Sampler(BF16, seed=5), 2
    args = kv_call(cache_mode)
    lead = (B, heads, BLOCKS * PAGE) if cache_mode == "Norm" else (BLOCKS, PAGE, heads)
    args[:2] = draw.normal(B, heads, S, 192), draw.gamma(192)
    caches = draw.normal(*lead, 192), draw.normal(*lead, 128)
    args[5:] = *caches, None, None, None, None, draw.normal(B, heads, S, 128)
    check(converted, "KvRmsNormRopeCache", "kv_rmsnorm_rope_cache", args, surface, cache_mode=cache_mode)


# --- attention over pages -----------------------------------------------------------------------------------------


def check_attention(converted, operator, args, **options):
    """To two ulps of the largest results: weights are rounded against the largest of other keys."""
    call = Call(operator, args, options)
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=1e-2, atol=4e-3)
    assert converted.types(converted.graphs[0]).count("FusedInferAttentionScore") == 1


@pytest.mark.campaign  # tests/npu/test_user_calls.py has the rest
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


@pytest.mark.parametrize("cache_mode", ["krope_ctkv", "nzcache"])
def test_ring_attention(converted, cache_mode):
    """The kernel marks a row without keys by another infinity than ATB."""
    draw, lengths = Sampler(BF16, seed=9), [0, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 1, width) for width in (HCKV, DR)]
    caches = [in_nz(cache) if cache_mode == "nzcache" else cache for cache in caches]
    queries = [draw.normal(len(lengths), 16, width) for width in (HCKV, DR)]
    args = [*queries, *caches, pages(draw, lengths), torch.tensor(lengths)]
    options = {"cache_mode": cache_mode, "calc_type": "calc_type_ring"}
    check_attention(converted, "multi_latent_attention", args, qk_scale=0.07, **options)


@pytest.mark.campaign
def test_paged_attention(converted):
    draw, lengths = Sampler(BF16, seed=7), [1, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 4, D) for _ in range(2)]
    args = [draw.normal(len(lengths), 32, D), *caches, pages(draw, lengths), lengths]
    check_attention(converted, "paged_attention", args, qk_scale=0.09, kv_head_num=4)


@pytest.mark.campaign
def test_paged_attention_with_heads_first(converted):
    draw, lengths = Sampler(BF16, seed=7), [1, 300, 128]
    caches = [draw.normal(len(lengths) * BLOCKS, 4, PAGE, D) for _ in range(2)]
    args = [draw.normal(len(lengths), 32, D), *caches, pages(draw, lengths), lengths]
    check_attention(converted, "paged_attention", args, qk_scale=0.09, kv_head_num=4, input_layout="type_bnsd")


@pytest.mark.campaign
def test_paged_attention_with_a_table_for_each_head(converted):
    draw, lengths = Sampler(BF16, seed=7), [1, 300, 128, 17, 250, 9]
    caches = [draw.normal(len(lengths) * BLOCKS, PAGE, 1, D) for _ in range(2)]
    args = [draw.normal(3, 32, D), *caches, pages(draw, lengths), lengths]
    options = {"kv_head_num": 2, "compress_type": "compress_type_kvhead"}
    check_attention(converted, "paged_attention", args, qk_scale=0.09, **options)
