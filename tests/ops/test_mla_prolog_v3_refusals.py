"""What mla_prolog_v3 refuses."""

import pytest
import torch
from lib.operators.harness import changed, refuses
from lib.operators.prolog_oracle import CACHES, PAGED, V3, call, expect

FIRST, PARTLY, FULLY, PACKED = (0, 0, "PA_BSND"), (1, 2, "PA_NZ"), (2, 1, "PA_BSND"), (1, 3, "PA_BSND")
BLOCKED, RAGGED, PLAIN = (1, 2, "PA_BLK_NZ"), (2, 1, "PA_BLK_BSND", (20,)), (2, 1, "BSND")
SEVEN = torch.ones(7)


def tail(tensor):
    return tensor[1:]


def columns(tensor):
    return tensor[..., 1:]


TENSORS = [
    (FIRST, "token_x", lambda x: x[0, 0], r"token_x has shape \[40\]; it must be \[B, S, He\] or \[T, He\]"),
    (FIRST, "cache_mode", "TND", r"token_x has shape \[2, 3, 40\]; it must be \[T, He\]"),
    (FIRST, "token_x", torch.Tensor.half, "token_x has dtype torch.float16; it must be torch.bfloat16"),
    (FIRST, "token_x", torch.Tensor.char, "token_x has dtype torch.int8; it must be torch.bfloat16"),
    (FIRST, "weight_dq", tail, r"weight_dq has shape \[39, 24\]; it must be \[He, Hcq\] = \[40, \*\]"),
    (FIRST, "weight_uq_qr", columns, r"weight_uq_qr has shape \[24, 119\]"),
    (FIRST, "weight_uq_qr", torch.Tensor.char, "weight_uq_qr has dtype torch.int8; it must be torch.bfl"),
    (PARTLY, "weight_uq_qr", torch.Tensor.float, "weight_uq_qr has dtype torch.float32; it must be torch.int8"),
    (PARTLY, "token_x", torch.Tensor.char, "token_x has dtype torch.int8; it must be torch.bfloat16"),
    (FULLY, "token_x", torch.Tensor.bfloat16, "token_x has dtype torch.bfloat16; it must be torch.int8"),
    (FULLY, "weight_dkv_kr", torch.Tensor.half, "weight_dkv_kr has dtype torch.float16; it must be torch.int8"),
    (FIRST, "weight_uk", lambda w: w[0], r"weight_uk has shape \[8, 64\]; it must be \[N, D, Hckv\]"),
    (FIRST, "weight_uk", torch.Tensor.char, "weight_uk has dtype torch.int8; allowed"),
    (PACKED, "weight_uk", torch.Tensor.float, "float32; allowed: torch.bfloat16, torch.float16"),
    (FIRST, "weight_dkv_kr", lambda w: w[:, :64], "rope width Dr, .* is 0; it must be even and at least 2"),
    (FIRST, "weight_dkv_kr", lambda w: w[:, :69], "rope width Dr, .* is 5; it must be even"),
    (FIRST, "rmsnorm_gamma_cq", tail, r"rmsnorm_gamma_cq has shape \[23\]"),
    (FIRST, "rmsnorm_gamma_ckv", tail, r"rmsnorm_gamma_ckv has shape \[63\]"),
    (FIRST, "rmsnorm_gamma_ckv", torch.Tensor.char, "rmsnorm_gamma_ckv has dtype torch.int8"),
    (FIRST, "rope_sin", tail, r"rope_sin has shape \[1, 3, 32\]; it must be \[B, S, Dr\]"),
    (FIRST, "rope_cos", lambda t: t[0], r"rope_cos has shape \[3, 32\]; it must be \[B, S, Dr\]"),
    (FIRST, "rope_cos", lambda t: t.to("meta"), "rope_cos is on meta; it must be on cpu"),
]
STORES = [
    (FIRST, "kv_cache", columns, r"kv_cache has shape \[4, 16, 1, 63\]"),
    (FIRST, "kv_cache", lambda c: c[:, 0], r"kv_cache has shape \[4, 1, 64\]; it must be \[BlockNum, "),
    (FIRST, "kr_cache", tail, r"kr_cache has shape \[3, 16, 1, 32\]"),
    (FIRST, "kv_cache", torch.Tensor.char, "kv_cache has dtype torch.int8; it must be .* dtype of weight_uk"),
    (PARTLY, "kr_cache", torch.Tensor.half, "kr_cache has dtype torch.float16; it must be torch.int8"),
    (FULLY, "kr_cache", torch.Tensor.char, "kr_cache has dtype torch.int8; it must be torch.bfloat16"),
    (PACKED, "kv_cache", columns, r"kv_cache has shape \[4, 16, 1, 279\]; it must be .* 280\]"),
    (PACKED, "kr_cache", torch.zeros(4, 16, 1, 8), r"kr_cache has shape \[4, 16, 1, 8\]; it must be \[0\]"),
    (PLAIN, "kv_cache", lambda c: c[:, 1:], r"kv_cache has shape \[2, 2, 1, 64\]; it must be \[B, S, 1, "),
]
SCALES = [
    (PARTLY, "dequant_scale_w_uq_qr", None,
     "dequant_scale_w_uq_qr is None; it must be a tensor with weight_quant_mode 1"),
    (FULLY, "dequant_scale_x", None, "dequant_scale_x is None; it must be a tensor with weight_quant_mode 2"),
    (FULLY, "dequant_scale_w_dq", None, "dequant_scale_w_dq is None"),
    (FULLY, "dequant_scale_w_dkv_kr", None, "dequant_scale_w_dkv_kr is None"),
    (FULLY, "quant_scale_ckv", None, "quant_scale_ckv is None; .* kv_cache_quant_mode 1"),
    (PARTLY, "quant_scale_ckr", None, "quant_scale_ckr is None; .* kv_cache_quant_mode 2"),
    (PACKED, "k_nope_clip_alpha", None, "k_nope_clip_alpha is None; .* kv_cache_quant_mode 3"),
    (FIRST, "smooth_scales_cq", SEVEN, "smooth_scales_cq is given; it must be None with weight_quant_mode 0"),
    (FIRST, "dequant_scale_w_uq_qr", SEVEN, "dequant_scale_w_uq_qr is given; it must be None"),
    (PARTLY, "dequant_scale_x", SEVEN, "dequant_scale_x is given; it must be None with weight_quant_mode 1"),
    (FULLY, "quant_scale_ckr", SEVEN, "quant_scale_ckr is given; .* kv_cache_quant_mode 1"),
    (FULLY, "k_nope_clip_alpha", SEVEN, "k_nope_clip_alpha is given"),
    (FULLY, "dequant_scale_x", lambda s: s.T, r"dequant_scale_x has shape \[1, 6\]; .* \[B\*S, 1\] = \[6, 1\]"),
    (FULLY, "dequant_scale_x", torch.Tensor.half, "dequant_scale_x has dtype torch.float16; .* torch.float32"),
    (FULLY, "quant_scale_ckv", torch.ones(1, 64), r"quant_scale_ckv has shape \[1, 64\]; it must be \[1\]"),
    (PARTLY, "quant_scale_ckv", torch.ones(1), r"quant_scale_ckv has shape \[1\]; it must be \[1, Hckv\]"),
    (PARTLY, "dequant_scale_w_uq_qr", torch.ones(6, 1), r"w_uq_qr has shape \[6, 1\]; it must be \[1, N\*"),
    (PARTLY, "smooth_scales_cq", SEVEN, r"smooth_scales_cq has shape \[7\]; it must be \[1, Hcq\]"),
]  # fmt: skip
OPTIONS = [
    *[(FIRST, "weight_quant_mode", mode, f"weight_quant_mode is {mode}, float8 of newer chips; allowed: 0, 1, 2")
      for mode in (3, 4, 5)],
    (FIRST, "weight_quant_mode", -1, "weight_quant_mode is -1; allowed: 0, 1, 2"),
    *[(FIRST, "kv_cache_quant_mode", mode, f"mode is {mode}; allowed with weight_quant_mode 0: 0")
      for mode in (1, 2, 3)],
    (PARTLY, "kv_cache_quant_mode", 1, "kv_cache_quant_mode is 1; allowed with weight_quant_mode 1: 0, 2, 3"),
    (FULLY, "kv_cache_quant_mode", 2, "kv_cache_quant_mode is 2; allowed with weight_quant_mode 2: 0, 1, 3"),
    (FULLY, "query_quant_mode", 0, "query_quant_mode is 0; allowed with kv_cache_quant_mode 1: 1"),
    (PARTLY, "query_quant_mode", 1, "query_quant_mode is 1; allowed with kv_cache_quant_mode 2: 0"),
    (PACKED, "ckvkr_repo_mode", 0, "ckvkr_repo_mode is 0; allowed with kv_cache_quant_mode 3: 1"),
    (FIRST, "ckvkr_repo_mode", 1, "ckvkr_repo_mode is 1; allowed with kv_cache_quant_mode 0: 0"),
    (PACKED, "quant_scale_repo_mode", 0, "quant_scale_repo_mode is 0; allowed with kv_cache_quant_mode 3: 1"),
    (PACKED, "tile_size", 64, "tile_size is 64; allowed with any mode: 128"),
    (FIRST, "cache_mode", "BNSD", "cache_mode is 'BNSD'; allowed: 'PA_BSND', 'PA_NZ', 'PA_BLK_BSND'"),
    *[(PACKED, "cache_mode", mode, f"'{mode}'; allowed with kv_cache_quant_mode 3: 'PA_BSND', 'BSND', 'TND', 'No")
      for mode in PAGED[1:]],
]  # fmt: skip
PLACES = [
    (FIRST, "cache_index", None, "cache_index is None; it must be a tensor with cache_mode 'PA_BSND'"),
    (PLAIN, "cache_index", SEVEN, "cache_index is given; it must be None with cache_mode 'BSND'"),
    (FIRST, "cache_index", torch.Tensor.int, "cache_index has dtype torch.int32; allowed: torch.int64"),
    (FIRST, "cache_index", tail, r"cache_index has shape \[1, 3\]; it must be \[B, S\]"),
    (PARTLY, "cache_index", lambda i: i + 64, "cache_index holds .*; it must be below 64, the number of slots"),
    (BLOCKED, "cache_index", lambda i: i + 4, "cache_index holds .*; it must be below 4, the number of blocks"),
    (BLOCKED, "cache_index", tail, r"cache_index has shape \[1, 1\]; .* \[B, ceil\(S/BlockSize\)\] = \[2, 1\]"),
    (BLOCKED, "actual_seq_len", SEVEN, "actual_seq_len is given; it must be None with .* rank 3"),
    (FIRST, "actual_seq_len", SEVEN, "actual_seq_len is given; it must be None with cache_mode 'PA_BSND'"),
    (RAGGED, "actual_seq_len", None, "actual_seq_len is None; it must be a tensor with cache_mode 'PA_BLK_BSND'"),
    (RAGGED, "actual_seq_len", torch.tensor([3, 19]), r"actual_seq_len is \[3, 19\]; .* 20, the number of tok"),
    (RAGGED, "actual_seq_len", torch.tensor([21, 20]), r"actual_seq_len is \[21, 20\]; .* not decreasing"),
    (RAGGED, "actual_seq_len", torch.tensor([-1, 20]), r"actual_seq_len is \[-1, 20\]"),
    (RAGGED, "actual_seq_len", SEVEN, "actual_seq_len has dtype torch.float32; allowed: torch.int32"),
    (RAGGED, "cache_index", tail, r"cache_index has shape \[2\]; it must be .* = \[3\]"),
]


@pytest.mark.parametrize(("mode", "name", "change", "message"), [*TENSORS, *STORES, *SCALES, *OPTIONS, *PLACES])
def test_refusal_writes_nothing(mode, name, change, message):
    a = call(*mode, **({"lengths": (3, 17)} if mode == RAGGED else {}))
    refuses(V3, (), changed(a, name, change), message)


@pytest.mark.parametrize("size", [8, 1040])
def test_pages_have_the_sizes_of_the_vendor(size):
    a = call(*FIRST)
    a |= {name: torch.zeros(4, size, *a[name].shape[2:]).bfloat16() for name in CACHES}
    refuses(V3, (), a, f"BlockSize, axis 1 of kv_cache, is {size}; it must be a multiple of 16 from 16 to 1024")


@pytest.mark.parametrize(("weights", "caches", "fractal"), [(0, 0, 16), (1, 2, 32)])
@pytest.mark.parametrize("name", CACHES)
def test_nz_pages_hold_whole_fractals(weights, caches, fractal, name):
    a = call(weights, caches, "PA_NZ")
    rank, width = (40, 32) if name == "kv_cache" else (64, 8)
    a |= {
        "weight_dkv_kr": a["weight_dkv_kr"][:, : rank + width],
        "weight_uk": a["weight_uk"][..., :rank].contiguous(),
        "weight_uq_qr": a["weight_uq_qr"][:, : 3 * (8 + width)],
        "rmsnorm_gamma_ckv": a["rmsnorm_gamma_ckv"][:rank],
        "kv_cache": a["kv_cache"][..., :rank].contiguous(),
        "kr_cache": a["kr_cache"][..., :width].contiguous(),
        **{table: a[table][..., :width].contiguous() for table in ("rope_sin", "rope_cos")},
    }
    if caches:
        a["quant_scale_ckv"], a["quant_scale_ckr"] = a["quant_scale_ckv"][:, :rank], a["quant_scale_ckr"][:, :width]
        a["dequant_scale_w_uq_qr"] = a["dequant_scale_w_uq_qr"][:, : 3 * (8 + width)]
    refuses(V3, (), a, f"The width of {name} is {a[name].shape[-1]}; it must be a multiple of {fractal}")
    expect(a | {"cache_mode": "PA_BSND"}, V3.overload(**(a | {"cache_mode": "PA_BSND"})))


def test_packed_tiles_are_whole():
    a = call(1, 3)
    a["weight_uk"] = a["weight_uk"][..., :200]
    a["rmsnorm_gamma_ckv"] = a["rmsnorm_gamma_ckv"][:200]
    a["weight_dkv_kr"] = a["weight_dkv_kr"][:, :208]
    refuses(V3, (), a, "Hckv, .* is 200; it must be a multiple of 128")
