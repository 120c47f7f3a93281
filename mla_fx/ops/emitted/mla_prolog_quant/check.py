"""The checks of mla_prolog_quant's arguments."""

import torch

from mla_fx.ops.common.check import (
    Sizes,
    check_dtypes,
    check_index,
    check_letters,
    check_multiple,
    check_optional,
    check_tensors,
    scale_dtypes,
)
from mla_fx.ops.common.math import check_rope

from .arguments import KEY_TILES, ROPE_LAYOUT, Arguments

SCALES = ("dequant_scale", "k_scale_cache", "smooth_scales_cq", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")


def check(a: Arguments) -> None:
    if a.cache_mode != "PA_BSND":
        raise ValueError(f"cache_mode is {a.cache_mode!r}; it must be 'PA_BSND', which the kernel always writes.")
    check_types(a)
    sizes: Sizes = {}
    check_letters(a, sizes, token_x="T, He", w_uk="N, D, Hckv")
    check_multiple("Hckv, the last axis of w_uk,", sizes["Hckv"], KEY_TILES, f"a positive multiple of {KEY_TILES}")
    check_letters(a, sizes, w_dkv_kr="He, Hckv+Dr")
    sizes["Dr"] = width = sizes["Hckv+Dr"] - sizes["Hckv"]
    check_rope(width, ROPE_LAYOUT, "T, Dr", (sizes["T"], width), cos=a.cos, sin=a.sin)
    check_letters(a, sizes, w_dq="He, Hcq")
    check_multiple("Hcq, the last axis of w_dq,", sizes["Hcq"], 1, "1 or more")
    sizes["N*(D+Dr)"] = sizes["N"] * (sizes["D"] + width)
    check_letters(a, sizes, gamma_cq="Hcq", gamma_ckv="Hckv", w_uq_qr="Hcq, N*(D+Dr)")
    check_scales(a, sizes)
    pages = "BlockNum, BlockSize, 1"
    caches = {"kv_cache": f"{pages}, Hckv", "kr_cache": f"{pages}, Dr", "k_scale_cache": f"{pages}, {KEY_TILES}"}
    check_letters(a, sizes, **caches, cache_index="T")
    check_index("cache_index", a.cache_index, sizes["BlockNum"] * sizes["BlockSize"])


def check_types(a: Arguments) -> None:
    codes = (torch.int8 if a.quantises_query else a.token_x.dtype,)
    own: dict[str, tuple[torch.dtype, ...]] = {"w_uq_qr": codes, "kv_cache": codes, "cache_index": (torch.int64,)}
    own |= dict.fromkeys(SCALES, scale_dtypes(a.token_x.dtype))
    if a.w_dq.dtype == torch.int8:
        own |= dict.fromkeys(("w_dq", "w_dkv_kr"), (torch.int8,))
    check_tensors(vars(a), free=("gamma_cq", "gamma_ckv", "cos", "sin"), skip=own)
    for name, tensor in {"w_uq_qr": a.w_uq_qr, "kv_cache": a.kv_cache}.items():
        if tensor.dtype == torch.int8 and not a.quantises_query:
            shape = list(a.dequant_scale.shape)
            raise ValueError(f"dequant_scale has shape {shape}; with {name} in int8 it must be [N*(D+Dr), 1].")
    check_dtypes(a, own)


def check_scales(a: Arguments, sizes: Sizes) -> None:
    """Check that the scales of w_dq and w_dkv_kr are given exactly if these are int8, and those of the query if it is
    int8."""
    for name in ("dequant_scale_w_dq", "dequant_scale_w_dkv_kr"):
        check_optional(name, getattr(a, name), a.w_dq.dtype == torch.int8, f"w_dq of dtype {a.w_dq.dtype}")
    check_letters(a, sizes, dequant_scale_w_dq="1, Hcq", dequant_scale_w_dkv_kr="1, Hckv+Dr")
    if a.quantises_query:
        check_letters(a, sizes, dequant_scale="N*(D+Dr), 1", smooth_scales_cq="Hcq or 1, Hcq")
        return
    if a.smooth_scales_cq is not None:
        raise ValueError("smooth_scales_cq is given; it must be None with an empty dequant_scale.")
    if not a.is_symmetry:
        raise ValueError("is_symmetry is False; it must be True with an empty dequant_scale.")
