"""The limits of the vendor's paged attention kernels: a sentence for each."""

import dataclasses

import pytest
import torch
from lib.ascend_calls import A2, DR, HCKV, B, D, N, S, T, index, limits, lower, make
from mla_fx.lowering.ascend.limits import Surface

pytestmark = pytest.mark.usefixtures("mode")

CAPTURED = Surface("Ascend910B3", "aclgraph", True, "8.5.0")
NO_CONVERTER = "torch.ops.atb has no converter to GE, and FusedInferAttentionScore, which has one, takes"
MLA = {
    f"cache_mode is 'int8_nzcache'; {NO_CONVERTER} 'krope_ctkv' or 'nzcache'": lambda: {"cache_mode": "int8_nzcache"},
    f"q_nope has 32 heads; {NO_CONVERTER} 'calc_type_spec' with 128 heads only, where it is causal":
        lambda: {"calc_type": "calc_type_spec", "q_seqlen": [1, 1]},
    "q_nope has N = 40; FusedInferAttentionScore takes 1, 2, 4, 8, 16, 32, 64 or 128":
        lambda: {"q_nope": make(B, 40, HCKV), "q_rope": make(B, 40, DR)},
    "q_nope has dtype torch.float32; FusedInferAttentionScore takes torch.bfloat16 or torch.float16":
        lambda: {"q_nope": make(B, N, HCKV, dtype=torch.float32)},
    "k_rope has shape [8, 128, 1, 64] and strides [16384, 128, 128, 1]; FusedInferAttentionScore takes no gaps":
        lambda: {"k_rope": make(8, 128, 1, 2 * DR)[..., :DR]},
}  # fmt: skip

ATB = {
    "cache_mode is 'kvcache'; torch.ops.atb takes latents and rotary keys in two caches":
        lambda: {"cache_mode": "kvcache", "q_rope": None, "k_rope": None},
    "calc_type is 'calc_type_ring'; with cache_mode 'int8_nzcache', torch_npu has lse in the wrong dtype":
        lambda: {"cache_mode": "int8_nzcache", "calc_type": "calc_type_ring"},
    "context_lens is a tensor; torch.ops.atb takes a host list, as the overload `host` does":
        lambda: {"context_lens": index(B)},
    "context_lens is [0, 5]; MultiLatentAttentionOperation leaves the rows of sequences without a context "
    "undefined":
        lambda: {"cache_mode": "int8_nzcache", "context_lens": [0, 5]},
    "k_rope has dtype torch.float32; MultiLatentAttentionOperation takes torch.bfloat16 or torch.float16":
        lambda: {"cache_mode": "int8_nzcache", "k_rope": make(8, 128, 1, DR, dtype=torch.float32)},
}  # fmt: skip

ATB_HAS_NONE = "torch.ops.atb._npu_paged_attention has no fake kernel"
NO_GRAPH = f"{ATB_HAS_NONE}, and FusedInferAttentionScore, which has one, takes"
PAGED = {
    f"mask_type is 'mask_type_norm'; {NO_GRAPH} 'undefined'": lambda: {"mask": make(1, 300), "mask_type": "norm"},
    f"quant_type is 'type_dequant_fusion', with float32 scales; {NO_GRAPH} scales in the dtype of query": lambda: {
        **dict.fromkeys(("key_cache", "value_cache"), make(8, 128, 4, D, dtype=torch.int8)),
        **dict.fromkeys(("k_descale", "v_descale"), make(4 * D, dtype=torch.float32)),
        "quant_type": "dequant_fusion",
    },
    "key_cache has BlockSize = 2048; FusedInferAttentionScore takes multiples of 16 up to 512":
        lambda: {"input_layout": "type_bnsd"} | dict.fromkeys(("key_cache", "value_cache"), make(8, 4, 2048, D)),
    f"the caches are NZ; {NO_GRAPH} plain ones here":
        lambda: {"key_cache": make(8, 32, 128, 16), "value_cache": make(8, 32, 128, 16)},
    f"value_cache is None; {NO_GRAPH} keys and values in two caches":
        lambda: {"value_cache": None, "mla_v_head_size": 64},
    f"q_scale is 0.5; {NO_GRAPH} no scale of the query": lambda: {"q_scale": 0.5},
    "query has dtype torch.float32; FusedInferAttentionScore takes torch.bfloat16 or torch.float16":
        lambda: {"query": make(B, N, D, dtype=torch.float32)},
    "value_cache has Dv = 64; FusedInferAttentionScore takes 128": lambda: {"value_cache": make(8, 128, 4, 64)},
    "key_cache has BlockSize = 1024; FusedInferAttentionScore takes multiples of 16 up to 512":
        lambda: {"key_cache": make(8, 1024, 4, D), "value_cache": make(8, 1024, 4, D)},
    "query has 128 heads and key_cache 1; FusedInferAttentionScore takes up to 64 for each of key_cache": lambda: {
        "query": make(B, 128, D),
        "key_cache": make(8, 128, 1, D),
        "value_cache": make(8, 128, 1, D),
        "kv_head_num": 1,
    },
    "query has 320 heads; FusedInferAttentionScore takes up to 256": lambda: {
        "query": make(B, 320, D),
        "key_cache": make(8, 128, 8, D),
        "value_cache": make(8, 128, 8, D),
        "kv_head_num": 8,
    },
    "key_cache has 256 heads of 256 columns; FusedInferAttentionScore takes up to 65535 together": lambda: {
        "query": make(B, 256, 256),
        "key_cache": make(8, 128, 256, 256),
        "value_cache": make(8, 128, 256, 256),
        "kv_head_num": 256,
    },
    f"context_lens is a tensor, which may hold 0; {NO_GRAPH} a context for each row of query":
        lambda: {"context_lens": index(B)},
    f"context_lens is [0, 5], which may hold 0; {NO_GRAPH} a context for each row of query":
        lambda: {"context_lens": [0, 5]},
    f"compress_type is 'compress_type_kvhead_rope'; {NO_GRAPH} no numbers that are added to scores":
        lambda: {"compress_type": "kvhead_rope"},
    f"query has 8 rows and context_lens 2; {NO_GRAPH} equally many":
        lambda: {"compress_type": "kvhead", "kv_head_num": 4},
    f"query has 1 rows and context_lens 2; {NO_GRAPH} equally many": lambda: {"query": make(1, N, D)},
}  # fmt: skip

NO_ROPE = {"query_rope": None, "kr_cache": None}
LATENTS = {
    "query_rope is None; FusedInferAttentionScore takes absorbed queries with a rotary part": lambda: NO_ROPE,
    "sinks are given; FusedInferAttentionScore takes them for values of up to 128 columns, not for latents of 512":
        lambda: {"sinks": make(N)},
}  # fmt: skip
HEADS = {
    "sinks has dtype torch.float32; FusedInferAttentionScore takes torch.bfloat16":
        lambda: {"sinks": make(N, dtype=torch.float32)},
    "without a rotary part, query has D = 64; FusedInferAttentionScore takes 128 or 192":
        lambda: {**NO_ROPE, "query": make(1, T, N, 64), "weight_uk": make(N, 64, HCKV)},
    "weight_uv has Dv = 192; FusedInferAttentionScore takes 128":
        lambda: {**NO_ROPE, "weight_uv": make(N, 192, HCKV)},
    "with sinks, weight_uv has Dv = 192; FusedInferAttentionScore takes 128": lambda: {
        **NO_ROPE,
        **dict.fromkeys(("weight_uk", "weight_uv"), make(N, 192, HCKV)),
        "query": make(1, T, N, 192),
        "sinks": make(N),
    },
}  # fmt: skip
LIMITS = [
    *limits("multi_latent_attention", MLA),
    *limits("multi_latent_attention", ATB, CAPTURED),
    *limits("paged_attention", PAGED),
    *limits("latent_attention", LATENTS),
    *limits("mla_attention", HEADS),
]


@pytest.mark.parametrize(("operator", "surface", "change", "sentence"), LIMITS)
def test_limits(operator, surface, change, sentence):
    assert callable(lower(operator, surface))
    assert lower(operator, surface, **change()) == sentence


def test_lengths_that_the_host_reads_ahead():
    """The other kernel takes them; ATB's would keep those of its capture."""
    ahead = dataclasses.replace(CAPTURED, reads_ahead=True)
    assert callable(lower("multi_latent_attention", ahead, context_lens=index(B)))


@pytest.mark.parametrize(("operator", "rows"), [("latent_attention", S), ("mla_attention", T)])
@pytest.mark.parametrize("name", ["context_lens", "mask"])
def test_hidden_keys_that_count(operator, rows, name):
    """The kernel leaves hidden keys out."""
    mask = {name: torch.tensor([3]) if name == "context_lens" else torch.ones(rows, T, dtype=torch.bool)}
    mask["is_causal"] = False
    trusting = dataclasses.replace(A2, trusts_masks=True)
    assert callable(lower(operator, trusting, **mask, fill=-1e4))
    sentence = "hidden scores are -1.5; FusedInferAttentionScore takes -10000 or less"
    assert lower(operator, trusting, **mask, fill=-1.5) == sentence
