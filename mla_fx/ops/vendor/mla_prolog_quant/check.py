"""What mla_prolog_quant refuses."""

import torch

from mla_fx.ops.common.check import (
    check_devices,
    check_dtype,
    check_index,
    check_multiple,
    check_optional,
    check_rank,
    check_shape,
    check_tensors,
)
from mla_fx.ops.common.math import check_rope

from .arguments import KEY_TILES, ROPE_LAYOUT, Arguments

SCALES = ("dequant_scale", "k_scale_cache", "smooth_scales_cq", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")


def check(a: Arguments) -> None:
    if a.cache_mode != "PA_BSND":
        raise ValueError(f"cache_mode is {a.cache_mode!r}; it must be 'PA_BSND', the only layout that is ever written.")
    check_dtypes(a)
    check_rank("token_x", a.token_x, "T, He")
    check_rank("w_uk", a.w_uk, "N, D, Hckv")
    tokens, hidden = a.token_x.shape
    heads, nope, rank = a.w_uk.shape
    check_multiple("Hckv, the last axis of w_uk,", rank, KEY_TILES, f"a positive multiple of {KEY_TILES}")
    check_shape("w_dkv_kr", a.w_dkv_kr, "He, Hckv+Dr", (hidden, None))
    width = a.w_dkv_kr.shape[1] - rank
    check_rope(width, ROPE_LAYOUT, "T, Dr", (tokens, width), cos=a.cos, sin=a.sin)
    check_shape("w_dq", a.w_dq, "He, Hcq", (hidden, None))
    compressed = a.w_dq.shape[1]
    check_multiple("Hcq, the last axis of w_dq,", compressed, 1, "1 or more")
    check_shape("gamma_cq", a.gamma_cq, "Hcq", (compressed,))
    check_shape("gamma_ckv", a.gamma_ckv, "Hckv", (rank,))
    check_shape("w_uq_qr", a.w_uq_qr, "Hcq, N*(D+Dr)", (compressed, heads * (nope + width)))
    check_token_scales(a, compressed, rank + width)
    check_quantisation(a)
    check_shape("kv_cache", a.kv_cache, "BlockNum, BlockSize, 1, Hckv", (None, None, 1, rank))
    blocks, block_size = a.kv_cache.shape[:2]
    check_shape("kr_cache", a.kr_cache, "BlockNum, BlockSize, 1, Dr", (blocks, block_size, 1, width))
    check_shape("k_scale_cache", a.k_scale_cache, "BlockNum, BlockSize, 1, 4", (blocks, block_size, 1, KEY_TILES))
    check_shape("cache_index", a.cache_index, "T", (tokens,))
    check_index("cache_index", a.cache_index, blocks * block_size)


def check_dtypes(a: Arguments) -> None:
    arguments = vars(a)
    codes = torch.int8 if a.quantises_query else a.token_x.dtype
    own = {"w_uq_qr": codes, "kv_cache": codes, "cache_index": torch.int64, **dict.fromkeys(SCALES, torch.float32)}
    if a.w_dq.dtype == torch.int8:
        own |= {"w_dq": torch.int8, "w_dkv_kr": torch.int8}
    check_devices(arguments)
    check_tensors(
        {name: value for name, value in arguments.items() if name not in own},
        free=("gamma_cq", "gamma_ckv", "cos", "sin"),
    )
    for name, tensor in {"w_uq_qr": a.w_uq_qr, "kv_cache": a.kv_cache}.items():
        if tensor.dtype == torch.int8 and not a.quantises_query:
            shape = list(a.dequant_scale.shape)
            raise ValueError(f"dequant_scale has shape {shape}; with {name} in int8 it must be [N*(D+Dr), 1].")
    for name, dtype in own.items():
        if arguments[name] is not None:
            check_dtype(name, arguments[name], (dtype,))


def check_token_scales(a: Arguments, compressed: int, keys: int) -> None:
    """The scales of w_dq and w_dkv_kr are given exactly if these are int8."""
    when = f"w_dq of dtype {a.w_dq.dtype}"
    for name, letters, size in (
        ("dequant_scale_w_dq", "1, Hcq", compressed),
        ("dequant_scale_w_dkv_kr", "1, Hckv+Dr", keys),
    ):
        if check_optional(name, getattr(a, name), a.w_dq.dtype == torch.int8, when):
            check_shape(name, getattr(a, name), letters, (1, size))


def check_quantisation(a: Arguments) -> None:
    columns, compressed = a.w_uq_qr.shape[1], a.w_dq.shape[1]
    if a.quantises_query:
        check_shape("dequant_scale", a.dequant_scale, "N*(D+Dr), 1", (columns, 1))
        if a.smooth_scales_cq is not None:
            lead = (1,) * (a.smooth_scales_cq.dim() - 1)
            check_rank("smooth_scales_cq", a.smooth_scales_cq, "Hcq or 1, Hcq")
            check_shape("smooth_scales_cq", a.smooth_scales_cq, "1, Hcq" if lead else "Hcq", (*lead, compressed))
        return
    if a.smooth_scales_cq is not None:
        raise ValueError("smooth_scales_cq is given; it must be None with an empty dequant_scale.")
    if not a.is_symmetry:
        raise ValueError("is_symmetry is False; it must be True with an empty dequant_scale.")
