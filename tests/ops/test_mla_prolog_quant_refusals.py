"""What mla_prolog_quant refuses."""

import pytest
import torch
from lib.operators.harness import CATALOGUE, changed, first_of, refuses, samples

OPERATOR = CATALOGUE["mla_prolog_quant"]
REFUSALS = {
    "quantised": [
        ("token_x", torch.Tensor.long, "token_x has dtype torch.int64; allowed: torch.bfloat16"),
        ("token_x", lambda x: x[None], r"token_x has shape \[1, 6, 32\]; it must be \[T, He\]"),
        ("w_dq", lambda w: w[1:], r"w_dq has shape \[31, 24\]; it must be \[He, Hcq\] = \[32, \*\]"),
        ("w_dq", torch.Tensor.half, "w_dq has dtype torch.float16; it must be torch.float32"),
        ("w_dq", lambda w: w[:, :0], "Hcq, the last axis of w_dq, is 0; it must be 1 or more"),
        ("w_uq_qr", torch.Tensor.float, "w_uq_qr has dtype torch.float32; allowed: torch.int8"),
        ("w_uq_qr", lambda w: w[:, 1:], r"w_uq_qr has shape \[24, 35\]; .* = \[24, 36\]"),
        ("w_uq_qr", lambda w: w.to("meta"), "w_uq_qr is on meta; it must be on cpu"),
        ("dequant_scale", lambda s: s[:0], "dequant_scale has shape .*; with w_uq_qr in int8 it must be"),
        ("dequant_scale", lambda s: s[:, 0], r"dequant_scale has shape \[36\]; it must be \[N\*\(D\+Dr"),
        ("dequant_scale", lambda s: s[0, 0], r"dequant_scale has shape \[\]"),
        ("dequant_scale", lambda s: s.mT, r"dequant_scale has shape \[1, 36\]; .* = \[36, 1\]"),
        ("dequant_scale", torch.Tensor.double, "dequant_scale has dtype torch.float64"),
        ("w_uk", lambda w: w[0], r"w_uk has shape \[8, 16\]; it must be \[N, D, Hckv\]"),
        ("w_uk", lambda w: w[1:], r"w_uq_qr has shape \[24, 36\]; .* = \[24, 24\]"),
        ("w_uk", lambda w: w[..., :14], "Hckv, the last axis of w_uk, is 14; it must be a positive mult"),
        ("w_dkv_kr", lambda w: w[:, :16], "rope part Dr, 0 here"),
        ("w_dkv_kr", lambda w: w[:, :19], "The rope width Dr is 3; it must be even"),
        ("w_dkv_kr", lambda w: w[1:], r"w_dkv_kr has shape \[31, 20\]"),
        ("gamma_cq", lambda g: g[None], r"gamma_cq has shape \[1, 24\]; it must be \[Hcq\]"),
        ("gamma_ckv", lambda g: g[1:], r"gamma_ckv has shape \[15\]; it must be \[Hckv\] = \[16\]"),
        ("cos", lambda t: t[:, :2], r"cos has shape \[6, 2\]; it must be \[T, Dr\] = \[6, 4\]"),
        ("sin", lambda t: t[:1], r"sin has shape \[1, 4\]; it must be \[T, Dr\] = \[6, 4\]"),
        ("sin", torch.Tensor.int, "sin has dtype torch.int32"),
        ("cache_index", torch.Tensor.int, "cache_index has dtype torch.int32; allowed: torch.int64"),
        ("cache_index", lambda i: i[None], r"cache_index has shape \[1, 6\]; it must be \[T\]"),
        ("cache_index", lambda i: i[1:], r"cache_index has shape \[5\]; it must be \[T\] = \[6\]"),
        ("cache_index", lambda i: i + 15, "cache_index holds .*; it must be below 15"),
        ("kv_cache", torch.Tensor.float, "kv_cache has dtype torch.float32; allowed: torch.int8"),
        ("kv_cache", lambda c: c[..., 1:], r"kv_cache has shape \[3, 5, 1, 15\]; .* = \[\*, \*, 1, 16\]"),
        ("kv_cache", lambda c: c[:, :, 0], r"kv_cache has shape \[3, 5, 16\]; it must be \[BlockNum, "),
        ("kr_cache", lambda c: c[1:], r"kr_cache has shape \[2, 5, 1, 4\]; .* = \[3, 5, 1, 4\]"),
        ("kr_cache", torch.Tensor.half, "kr_cache has dtype torch.float16; it must be torch.float32"),
        ("k_scale_cache", lambda c: c[..., :1], r"k_scale_cache has shape \[3, 5, 1, 1\]"),
        ("k_scale_cache", lambda c: c[:, 1:], r"k_scale_cache has shape \[3, 4, 1, 4\]"),
        ("cache_mode", "BSND", "cache_mode is 'BSND'; it must be 'PA_BSND'"),
        ("dequant_scale_w_dq", torch.ones(1, 24),
         "dequant_scale_w_dq is given; it must be None with w_dq of dtype torch.float32"),
        ("dequant_scale_w_dkv_kr", torch.ones(1, 20), "dequant_scale_w_dkv_kr is given; it must be None"),
    ],
    "quantised, smooth": [
        ("smooth_scales_cq", lambda s: s[1:], r"smooth_scales_cq has shape \[23\]; .* = \[24\]"),
        ("smooth_scales_cq", lambda s: s.view(24, 1), r"\[24, 1\]; it must be .* = \[1, 24\]"),
        ("smooth_scales_cq", lambda s: s.view(1, 1, 24), r"\[1, 1, 24\]; it must be \[Hcq\] or"),
        ("smooth_scales_cq", torch.Tensor.half, "smooth_scales_cq has dtype torch.float16"),
    ],
    "quantised, asymmetric": [
        ("dequant_scale", lambda s: s[1:], r"dequant_scale has shape \[35, 1\]"),
    ],
    "quantised, asymmetric, smooth": [
        ("smooth_scales_cq", lambda s: s[:1], r"smooth_scales_cq has shape \[1\]"),
    ],
    "int8 tokens": [
        ("dequant_scale_w_dq", None, "dequant_scale_w_dq is None; it must be a tensor with w_dq of dtype torch.int8"),
        ("dequant_scale_w_dkv_kr", None, "dequant_scale_w_dkv_kr is None; it must be a tensor"),
        ("dequant_scale_w_dq", lambda s: s.mT,
         r"dequant_scale_w_dq has shape \[24, 1\]; it must be \[1, Hcq\] = \[1, 24\]"),
        ("dequant_scale_w_dkv_kr", lambda s: s[0],
         r"dequant_scale_w_dkv_kr has shape \[20\]; it must be \[1, Hckv\+Dr\]"),
        ("dequant_scale_w_dq", torch.Tensor.double,
         "dequant_scale_w_dq has dtype torch.float64; allowed: torch.float32"),
        ("w_dkv_kr", torch.Tensor.float, "w_dkv_kr has dtype torch.float32; allowed: torch.int8"),
        ("w_dq", torch.Tensor.float, "w_dkv_kr has dtype torch.int8; it must be torch.float32"),
        ("token_x", torch.Tensor.char, "token_x has dtype torch.int8; allowed: torch.bfloat16"),
    ],
    "int8 tokens, unquantised": [
        ("w_dq", torch.Tensor.half, "w_dq has dtype torch.float16; it must be"),
    ],
    "unquantised": [
        ("is_symmetry", False, "is_symmetry is False; it must be True with an empty dequant_scale"),
        ("smooth_scales_cq", torch.ones(24), "smooth_scales_cq is given; it must be None with an empty"),
        ("w_uq_qr", torch.Tensor.half, "w_uq_qr has dtype torch.float16; allowed: torch.float32"),
        ("kv_cache", lambda c: c.to(torch.int8), "dequant_scale .*; with kv_cache in int8 it must be"),
        ("k_scale_cache", lambda c: c[:1], r"k_scale_cache has shape \[1, 5, 1, 4\]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("mode", "row"), [(mode, row) for mode, rows in REFUSALS.items() for row in rows])
def test_refusal_writes_nothing(mode, row):
    name, change, message = row
    refuses(OPERATOR, (), changed(first_of(mode, OPERATOR.name, torch.float32), name, change), message)


def test_every_mode_refuses_something():
    assert set(REFUSALS) == {sample.mode for sample in samples(OPERATOR.name, torch.float32)}
