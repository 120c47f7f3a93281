"""The limits of the vendor's kernels: a sentence for each, without torch_npu."""

import dataclasses

import pytest
import torch
from lib.ascend_calls import (
    A2,
    DR,
    HCKV,
    HE,
    B,
    S,
    T,
    caches,
    index,
    limits,
    lower,
    make,
    prolog_weights,
)
from mla_fx.lowering.ascend.limits import Surface
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from mla_fx.graph.torch_private import unset_fake_temporarily

pytestmark = pytest.mark.usefixtures("mode")

# The chips with each kernel.
CHIPS = {
    "mla_prolog": "MlaPrologV3 of CANN 8.5.0 exists on Ascend910B or Ascend910_93",
    "mla_prolog_v3": "MlaPrologV3 of CANN 8.5.0 exists on Ascend910B or Ascend910_93",
    "kv_rmsnorm_rope_cache": "KvRmsNormRopeCache exists on Ascend910B, Ascend910_93 or Ascend950",
    "rms_norm": "RmsNorm exists on Ascend910B, Ascend910_93 or Ascend950",
    "rope": "InterleaveRope exists on Ascend910B or Ascend910_93",
    "multi_latent_attention": "FusedInferAttentionScore exists on Ascend910B or Ascend910_93",
    "paged_attention": "FusedInferAttentionScore exists on Ascend910B or Ascend910_93",
}


@pytest.mark.parametrize("graph", ["ge", "aclgraph"])
@pytest.mark.parametrize("operator", sorted(CHIPS))
def test_a_call_within_all_limits_is_taken(operator, graph):
    assert callable(lower(operator, Surface("Ascend910_9391", graph, hoists=False, cann="8.5.0")))


def test_equal_calls_become_one_function_so_that_they_are_traced_once():
    assert lower("mla_prolog") is lower("mla_prolog")
    assert lower("kv_rmsnorm_rope_cache") is lower("kv_rmsnorm_rope_cache")


def norm(positions=T, lead=B):
    return {"cache_mode": "Norm", "cache_index": index(1, S), **caches(lead, 1, positions)}


def of_float16():
    return {name: tensor.half() for name, tensor in prolog_weights().items()}


# Changes are functions, because tensors are made within a test.
PROLOG = {
    "weight_dq has He = 7000; MlaPrologV3 of CANN 8.5.0 takes 1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680 or "
    "8192":
        lambda: prolog_weights(he=7000),
    "weight_dq has Hcq = 1000; MlaPrologV3 of CANN 8.5.0 takes 1536": lambda: prolog_weights(hcq=1000),
    "weight_uk has N = 40; MlaPrologV3 takes 1, 2, 4, 8, 16, 32, 64 or 128": lambda: prolog_weights(n=40),
    "weight_uk has D = 64; MlaPrologV3 of CANN 8.5.0 takes 128": lambda: prolog_weights(d=64),
    "weight_uk has Hckv = 256; MlaPrologV3 takes 512": lambda: prolog_weights(hckv=256) | caches(8, 128, 1, hckv=256),
    "weight_dkv_kr has Dr = 32; MlaPrologV3 takes 64": lambda: prolog_weights(dr=32) | caches(8, 128, 1, dr=32),
    "weight_uk has dtype torch.float16; MlaPrologV3 takes torch.bfloat16": of_float16,
    "rope_cos has dtype torch.float32; MlaPrologV3 takes torch.bfloat16":
        lambda: {"rope_cos": make(B, S, DR, dtype=torch.float32)},
    "kv_cache has BlockSize = 24; MlaPrologV3 of CANN 8.5.0 takes multiples of 16 up to 1024": lambda: caches(8, 24, 1),
    "kv_cache has BlockSize = 2048; MlaPrologV3 of CANN 8.5.0 takes multiples of 16 up to 1024":
        lambda: caches(8, 2048, 1),
    "kr_cache has shape [8, 128, 1, 64] and strides [16384, 128, 128, 1]; MlaPrologV3 takes no gaps behind axis 0":
        lambda: {"kr_cache": make(8, 128, 1, 2 * DR)[..., :DR]},
}  # fmt: skip
FIRST = {
    "weight_dq is None; MlaPrologV3 computes the query from a compressed one":
        lambda: {"weight_dq": None, "rmsnorm_gamma_cq": None},
    "rope_sin and rope_cos are None; MlaPrologV3 always rotates": lambda: {"rope_sin": None, "rope_cos": None},
    "rope_layout is 'interleave_interleave'; MlaPrologV3 writes halves, which reorders kr_cache":
        lambda: {"rope_layout": "interleave_interleave"},
    "kv_cache has T = 250; MlaPrologV3 writes pages, so T must be a multiple of 16: make the cache 256 tokens long":
        lambda: norm(positions=250),
    "kv_cache has shape [2, 1, 256, 512] and strides [262144, 262144, 1024, 1]; MlaPrologV3 takes no gaps":
        lambda: norm() | {"kv_cache": make(B, 1, T, 2 * HCKV)[..., :HCKV]},
}  # fmt: skip
EARLIER = {
    "weight_dq has He = 4096; MlaPrologV2 takes 7168": lambda: prolog_weights(he=4096),
    "weight_dq has Hcq = 2048; MlaPrologV2 takes 1536": lambda: prolog_weights(hcq=2048),
    "weight_uk has D = 192; MlaPrologV2 takes 128": lambda: prolog_weights(d=192),
    "token_x has S = 20; MlaPrologV2 takes 1 to 16":
        lambda: {"token_x": make(B, 20, HE)} | {name: make(B, 20, DR) for name in ("rope_sin", "rope_cos")},
    "kv_cache has BlockSize = 32; MlaPrologV2 takes 16 or 128": lambda: caches(8, 32, 1),
    "cache_mode is 'BSND'; MlaPrologV2 takes PA_BSND or PA_NZ":
        lambda: {"cache_mode": "BSND", "cache_index": None} | caches(B, S, 1),
    "qc_qr_scale is 1.5; MlaPrologV2 has no such factor, MlaPrologV3 does": lambda: {"qc_qr_scale": 1.5},
    "kc_scale is 1.5; MlaPrologV2 has no such factor, MlaPrologV3 does": lambda: {"kc_scale": 1.5},
}  # fmt: skip


def test_where_the_first_prologs_are_chosen():
    first = dataclasses.replace(A2, prolog="v1")
    assert lower("mla_prolog", first, **prolog_weights(n=16)) == "weight_uk has N = 16; MlaProlog takes 32, 64 or 128"
    assert lower("mla_prolog", dataclasses.replace(first, chip="Ascend950PR")) == (
        "the chip is Ascend950PR; MlaProlog exists on Ascend910B or Ascend910_93"
    )
    assert lower("mla_prolog", dataclasses.replace(first, mode="aclgraph")) == (
        "MlaProlog writes caches that its schema marks as read-only; a captured graph does not order such writes"
    )
    assert lower("mla_prolog_v3", first) == (
        "the prolog of torch_npu is v1 here, by its version or by option prolog; MlaPrologV3 is v3"
    )


@pytest.mark.parametrize("size, lead", [(256, B), (48, B), (T, 1)])
def test_contiguous_caches_that_fill_pages_are_taken(size, lead):
    assert callable(lower("mla_prolog", **norm(size, lead)))


def of_any_size(mode, free, *shape):
    """A fake tensor whose axes `free` have symbols for their sizes."""
    with unset_fake_temporarily():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
    dynamic = [DimDynamic.DYNAMIC if axis in free else DimDynamic.STATIC for axis in range(len(shape))]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


def test_the_number_of_blocks_and_tokens_is_free_and_not_guarded(mode):
    token_x = of_any_size(mode, (0, 1, 2), B, S, HE)
    batch, tokens, _ = token_x.shape
    paged = {
        "token_x": token_x,
        "cache_index": index(batch, tokens),
        "kv_cache": of_any_size(mode, (0,), 8, 128, 1, HCKV),
    }
    paged |= {"kr_cache": make(paged["kv_cache"].shape[0], 128, 1, DR)}
    paged |= {name: make(batch, tokens, DR) for name in ("rope_sin", "rope_cos")}
    assert callable(lower("mla_prolog", **paged))
    assert callable(lower("mla_prolog", **paged | {"cache_mode": "Norm"} | caches(batch, 1, T)))
    assert not mode.shape_env.guards


def pages_of(mode, size):
    kv_cache = of_any_size(mode, (1,), 8, size, 1, HCKV)
    return {"kv_cache": kv_cache, "kr_cache": make(8, kv_cache.shape[1], 1, DR)}


def test_a_size_within_its_limits_is_guarded_to_stay_there(mode):
    assert callable(lower("mla_prolog", **pages_of(mode, 128)))
    assert len(mode.shape_env.guards) == 3, "a multiple of 16, no less than that, up to 1024"


def test_a_size_outside_of_its_limits_is_refused_and_not_guarded(mode):
    caches = pages_of(mode, 24)
    size = caches["kv_cache"].shape[1]
    assert lower("mla_prolog", **caches) == (
        f"kv_cache has BlockSize = {size}; MlaPrologV3 of CANN 8.5.0 takes multiples of 16 up to 1024"
    )
    assert not mode.shape_env.guards


def test_halves_are_read_where_the_columns_of_weights_can_be_reordered_once():
    halves = {"rope_layout": "half_half", "gamma_after_cast": True}
    assert callable(lower("mla_prolog", A2, **halves))
    assert lower("mla_prolog", dataclasses.replace(A2, hoists=False), **halves) == (
        "rope_layout is 'half_half'; MlaPrologV3 reads interleaved columns, and this target does not "
        "reorder the columns of weights"
    )


def in_int8(cache_mode, *lead):
    widths = {"k": DR, "ckv": HCKV}
    caches = {f"{name}_cache": make(*lead, width, dtype=torch.int8) for name, width in widths.items()}
    scales = {f"{name}_scale": make(width, dtype=torch.float32) for name, width in {"k_rope": DR, "c_kv": HCKV}.items()}
    index_of_rows = {"index": index(B, S)} if cache_mode == "Norm" else {}
    return {**caches, **scales, **index_of_rows, "cache_mode": cache_mode}


KV = {
    "kc_scale is 1.5; KvRmsNormRopeCache stores norms as they are": lambda: {"kc_scale": 1.5},
    "cos and sin are None; KvRmsNormRopeCache always rotates": lambda: {"cos": None, "sin": None},
    "rope_layout is 'half_half'; KvRmsNormRopeCache reads interleaved columns and writes halves, 'interleave_half'":
        lambda: {"rope_layout": "half_half"},
    "kv has dtype torch.float32; KvRmsNormRopeCache takes torch.bfloat16 or torch.float16":
        lambda: {"kv": make(B, 1, S, HCKV + DR, dtype=torch.float32)},
    "gamma has dtype torch.float32; KvRmsNormRopeCache takes torch.bfloat16":
        lambda: {"gamma": make(HCKV, dtype=torch.float32)},
    "gamma has Hckv = 448; KvRmsNormRopeCache takes 512": lambda: {"gamma": make(448)},
    "kv has Dr = 32; KvRmsNormRopeCache takes 64": lambda: {"kv": make(B, 1, S, 544)},
    "k_cache has BlockSize = 24; KvRmsNormRopeCache takes multiples of 16 in cache_mode 'PA_NZ'":
        lambda: {"k_cache": make(8, 24, 1, DR), "ckv_cache": make(8, 24, 1, HCKV)},
    "k_cache has BlockSize = 16; KvRmsNormRopeCache takes multiples of 32 in cache_mode 'PA_NZ'": lambda: {
        "k_cache": make(8, 16, 1, DR, dtype=torch.int8),
        "ckv_cache": make(8, 16, 1, HCKV, dtype=torch.int8),
    },
    "ckv_cache has T = 48; KvRmsNormRopeCache writes int8 in pages, so T must be a multiple of 32: make the cache "
    "64 tokens long":
        lambda: in_int8("Norm", B, 1, 48),
    "a cache is int8 in cache_mode 'BNSD'; KvRmsNormRopeCache takes int8 in pages only":
        lambda: in_int8("BNSD", B, 1, S) | {"index": None},
    "k_cache has shape [2, 1, 256, 64] and strides [32768, 32768, 128, 1]; KvRmsNormRopeCache takes no gaps":
        lambda: in_int8("Norm", B, 1, T) | {"k_cache": make(B, 1, T, 2 * DR)[..., :DR], "k_rope_scale": None},
    "rounds_first is True; KvRmsNormRopeCache quantises unrounded values":
        lambda: in_int8("PA", 8, 128, 1) | {"rounds_first": True},
    "gamma_after_cast is True; KvRmsNormRopeCache quantises latents that are not rounded before gamma":
        lambda: in_int8("PA", 8, 128, 1) | {"gamma_after_cast": True},
    "k_cache has BlockNum = 1; KvRmsNormRopeCache takes B*Ceil(S/BlockSize) = 2 or more":
        lambda: {"k_cache": make(1, 128, 1, DR), "ckv_cache": make(1, 128, 1, HCKV)},
    "ckv_cache has shape [8, 128, 1, 512] and strides [131072, 1024, 1024, 1]; KvRmsNormRopeCache takes no gaps":
        lambda: {"ckv_cache": make(8, 128, 1, 2 * HCKV)[..., :HCKV]},
}  # fmt: skip


@pytest.mark.parametrize("positions", [32, 128, 160])
def test_int8_caches_become_pages(positions):
    assert callable(lower("kv_rmsnorm_rope_cache", **in_int8("Norm", B, 1, positions)))


def with_v(heads=2, width=192, values=128):
    return {
        "kv": make(B, heads, S, width),
        "gamma": make(width),
        "v": make(B, heads, S, values),
        "k_cache": make(8, 128, heads, width),
        "ckv_cache": make(8, 128, heads, values),
    }


V = {
    "kv has N = 3; KvRmsNormRopeCache with v takes 1, 2, 4 or 8": lambda: with_v(heads=3),
    "kv has Dk = 160; KvRmsNormRopeCache with v takes 192": lambda: with_v(width=160),
    "v has Dv = 64; KvRmsNormRopeCache with v takes 128": lambda: with_v(values=64),
    "cos has Dr = 32; KvRmsNormRopeCache with v takes 64":
        lambda: with_v() | {"cos": make(B, 1, S, 32), "sin": make(B, 1, S, 32)},
}  # fmt: skip


def test_int8_heads_are_not_paged():
    norm = {"cache_mode": "Norm", "index": index(B, S), "c_kv_scale": make(2, 128, dtype=torch.float32)}
    caches = {"k_cache": make(B, 2, T, 192), "ckv_cache": make(B, 2, T, 128, dtype=torch.int8)}
    sentence = "a cache is int8 in cache_mode 'Norm' with v; KvRmsNormRopeCache takes int8 in pages only"
    assert lower("kv_rmsnorm_rope_cache", **with_v() | norm | caches) == sentence


NORM = {
    "x has dtype torch.float64; RmsNorm takes torch.bfloat16, torch.float16 or torch.float32":
        lambda: {"x": make(B, HE, dtype=torch.float64)},
}  # fmt: skip
ROPE = {
    "x has dtype torch.float32; InterleaveRope takes torch.bfloat16 or torch.float16":
        lambda: {"x": make(B, S, 1, DR, dtype=torch.float32)},
    "x has Dr = 32; InterleaveRope takes 64": lambda: {"x": make(B, S, 1, 32)},
    "x has Dr = 32; RotaryMul takes 64": lambda: {"x": make(B, S, 1, 32), "rope_layout": "half_half"},
    "rope_layout is 'interleave_interleave'; InterleaveRope and RotaryMul write halves":
        lambda: {"rope_layout": "interleave_interleave"},
}  # fmt: skip
EARLIER_SURFACE, NINE = dataclasses.replace(A2, prolog="v2"), dataclasses.replace(A2, cann="9.0.0")
LIMITS = [
    *limits("mla_prolog", FIRST | PROLOG),
    *limits("mla_prolog", EARLIER, EARLIER_SURFACE),
    *limits("mla_prolog_v3", PROLOG),
    *limits("kv_rmsnorm_rope_cache", KV),
    *limits("kv_rmsnorm_rope_cache", V, NINE),
    *limits("rms_norm", NORM),
    *limits("rope", ROPE),
]


@pytest.mark.parametrize(("operator", "surface", "change", "sentence"), LIMITS)
def test_limits(operator, surface, change, sentence):
    assert callable(lower(operator, surface))
    assert lower(operator, surface, **change()) == sentence


def test_rows_with_v_are_taken_where_the_release_and_the_chip_have_them():
    newer = dataclasses.replace(NINE, chip="Ascend950PR")
    assert callable(lower("kv_rmsnorm_rope_cache", newer))
    assert callable(lower("kv_rmsnorm_rope_cache", NINE, **with_v()))
    assert lower("kv_rmsnorm_rope_cache", newer, **with_v()) == (
        "v is given; KvRmsNormRopeCache of CANN 9.0.0 takes none on Ascend950PR"
    )


@pytest.mark.parametrize("operator", sorted(CHIPS))
def test_other_chips(operator):
    assert lower(operator, Surface("Ascend310P3", "ge", True, "8.5.0")) == f"the chip is Ascend310P3; {CHIPS[operator]}"
