"""The checks of mla_prolog's arguments."""

import warnings

import torch
from torch._subclasses.fake_tensor import is_fake

from mla_fx.ops.common.cache import of_pages, page_shape
from mla_fx.ops.common.check import (
    Sizes,
    check_choice,
    check_fractals,
    check_letters,
    check_optional,
    check_tensors,
)
from mla_fx.ops.common.math import check_rope
from mla_fx.ops.emitted.mla_prolog_v3 import arguments as v3
from mla_fx.ops.emitted.mla_prolog_v3 import check as check_v3

from .arguments import Arguments

CACHE_MODES = {mode: check_v3.CACHE_MODES[mode] for mode in ("PA_BSND", "PA_NZ", "Norm", "BSND", "TND")}
QUANTIZED_MODES = ("PA_BSND", "PA_NZ", "BSND", "TND")

# Scales that the page of npu_mla_prolog calls reserved: those that its kernel reads nevertheless, and the others.
RESERVED_BUT_READ = ("dequant_scale_w_uq_qr", "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")
RESERVED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")
READ_WARNING = (
    f"npu_mla_prolog documents {', '.join(RESERVED_BUT_READ)} as reserved; they are used here as its kernel uses them."
)


def check(a: Arguments) -> None:
    for name in RESERVED:
        check_optional(name, getattr(a, name), False, "this interface; mla_prolog_v3 takes it in weight_quant_mode 2")
    if a.weight_uq_qr.dtype == torch.int8:
        check_quantized(a)
    else:
        check_unquantized(a)
    if not is_fake(a.token_x) and any(getattr(a, name) is not None for name in RESERVED_BUT_READ):
        warnings.warn(READ_WARNING, stacklevel=2)


def check_quantized(a: Arguments) -> None:
    when = "an int8 weight_uq_qr"
    for name in ("weight_dq", "rmsnorm_gamma_cq", "rope_sin", "rope_cos"):
        check_optional(name, getattr(a, name), True, when)
    check_choice("cache_mode", a.cache_mode, QUANTIZED_MODES)
    check_choice("rope_layout", a.rope_layout, ("interleave_half",))
    if a.gamma_after_cast:
        raise ValueError(f"gamma_after_cast is True; it must be False with {when}.")
    check_v3.check(as_v3(a))


def as_v3(a: Arguments) -> v3.Arguments:
    """The same arguments for mla_prolog_v3. Its check takes them if weight_uq_qr is int8, its body always."""
    has_codes, is_int8 = (tensor.dtype == torch.int8 for tensor in (a.kv_cache, a.weight_uq_qr))
    return v3.Arguments(**vars(a), weight_quant_mode=int(is_int8), kv_cache_quant_mode=2 * has_codes)


def check_unquantized(a: Arguments) -> None:
    for name in RESERVED_BUT_READ:
        check_optional(name, getattr(a, name), False, f"a weight_uq_qr of {a.weight_uq_qr.dtype}")
    free = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
    check_tensors(vars(a), free=free, skip=("cache_index",))
    check_choice("cache_mode", a.cache_mode, (*CACHE_MODES, "NZ"))
    if a.cache_mode == "NZ":
        check_fractals("kv_cache", a.kv_cache, "Hckv")
        check_fractals("kr_cache", a.kr_cache, "Dr")
        a = of_pages(a, "kv_cache", "kr_cache", form=page_shape)
    sizes: Sizes = {}
    weights = {"weight_uk": "N, D, Hckv", "weight_dkv_kr": "He, Hckv+Dr", "rmsnorm_gamma_ckv": "Hckv"}
    check_letters(a, sizes, token_x=CACHE_MODES[a.cache_mode][0], **weights)
    sizes["Dr"] = width = sizes["Hckv+Dr"] - sizes["Hckv"]
    letters, tokens = "B, S" if "B" in sizes else "T", a.token_x.shape[:-1]
    tables = {"rope_sin": a.rope_sin, "rope_cos": a.rope_cos}
    check_rope(width, a.rope_layout, f"{letters}, Dr", (*tokens, width), **tables)
    if (a.weight_dq is None) != (a.rmsnorm_gamma_cq is None):
        raise ValueError("Only one of weight_dq and rmsnorm_gamma_cq is given; both must be tensors or both None.")
    if a.weight_dq is None:
        sizes["Hcq"] = sizes["He"]
    sizes["N*(D+Dr)"] = sizes["N"] * (sizes["D"] + width)
    check_letters(a, sizes, weight_dq="He, Hcq", rmsnorm_gamma_cq="Hcq", weight_uq_qr="Hcq, N*(D+Dr)")
    letters = CACHE_MODES[a.cache_mode][1]
    check_letters(a, sizes, kv_cache=f"{letters}, Hckv", kr_cache=f"{letters}, Dr")
    if a.cache_mode == "PA_NZ":
        check_v3.check_layout("kv_cache", a.kv_cache, a.cache_mode)
        check_v3.check_layout("kr_cache", a.kr_cache, a.cache_mode)
    check_v3.check_position(as_v3(a))
