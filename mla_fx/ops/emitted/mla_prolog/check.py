"""The checks of the arguments of mla_prolog and of mla_prolog_v3."""

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from mla_fx.ops.common.cache import of_pages, page_count, page_shape
from mla_fx.ops.common.check import (
    FLOATS,
    INTEGERS,
    Sizes,
    check_choice,
    check_dense_pages,
    check_devices,
    check_dtype,
    check_dtypes,
    check_fractals,
    check_index,
    check_letters,
    check_multiple,
    check_optional,
    check_rank,
    check_shape,
    check_tensors,
    known_to_differ,
    readable,
    scale_dtypes,
)
from mla_fx.ops.common.math import ROPE_LAYOUTS, check_rope
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import TILE, Arguments, Prolog, V3Arguments, stored_key

# Per cache mode: the axes of token_x, and those of the caches except the last.
PAGES = ("B, S, He or T, He", "BlockNum, BlockSize, 1")
CACHE_MODES = {
    **dict.fromkeys(("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ"), PAGES),
    "BSND": ("B, S, He", "B, S, 1"),
    "TND": ("T, He", "T, 1"),
    "Norm": ("B, S, He", "B, 1, T"),
}
# Per weight_quant_mode: the kv_cache_quant_modes that go with it.
QUANT_MODES = {0: (0,), 1: (0, 2, 3), 2: (0, 1, 3)}
NEWER_MODES = (3, 4, 5)
PER_TENSOR, PER_CHANNEL, PER_TILE = 1, 2, 3
PACKED = (torch.bfloat16, torch.float16, torch.float64)  # dtypes beside packed rows
# Options that follow from kv_cache_quant_mode: 1 in one mode, 0 in the others.
COUPLED = {"query_quant_mode": PER_TENSOR, "ckvkr_repo_mode": PER_TILE, "quant_scale_repo_mode": PER_TILE}
NUMBERS = ("weight_quant_mode", "kv_cache_quant_mode", *COUPLED, "tile_size")

# cache_modes of mla_prolog, and those with an int8 weight_uq_qr.
FIRST_MODES = ("PA_BSND", "PA_NZ", "Norm", "BSND", "TND", "NZ")
QUANTIZED_MODES = ("PA_BSND", "PA_NZ", "BSND", "TND")

# Scales that the page of npu_mla_prolog calls reserved: those that its kernel reads nevertheless, and the others.
RESERVED_BUT_READ = ("dequant_scale_w_uq_qr", "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")
RESERVED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")
READ_WARNING = (
    f"npu_mla_prolog documents {', '.join(RESERVED_BUT_READ)} as reserved; they are used here as its kernel uses them."
)


def check_v3(a: V3Arguments) -> None:
    # A compiler may pass these as symbols, but their values decide what is computed.
    numbers: dict[str, Any] = {name: int(getattr(a, name)) for name in NUMBERS}
    a = replace(a, **numbers)
    check_modes(a)
    check_cache_mode(a.cache_mode, a.kv_cache_quant_mode)
    check_choice("rope_layout", a.rope_layout, ROPE_LAYOUTS)
    check_types(a)
    check_devices(vars(a), lengths=("actual_seq_len",))
    sizes = check_shapes(a)
    check_scales(a, sizes)
    check_caches(a, sizes)
    check_position(a)


def check_modes(a: Prolog) -> None:
    """Check that the quantisations of weights and caches can be combined, and that the other options follow from
    them."""
    weight, cache = a.weight_quant_mode, a.kv_cache_quant_mode
    if weight in NEWER_MODES:
        raise ValueError(f"weight_quant_mode is {weight}, float8 of newer chips; allowed: 0, 1, 2.")
    if weight not in QUANT_MODES:
        raise ValueError(f"weight_quant_mode is {weight}; allowed: 0, 1, 2.")
    check_number("kv_cache_quant_mode", cache, QUANT_MODES[weight], f"weight_quant_mode {weight}")
    for name, mode in COUPLED.items():
        check_number(name, getattr(a, name), (int(cache == mode),), f"kv_cache_quant_mode {cache}")
    check_number("tile_size", a.tile_size, (TILE,), "any mode")


def check_number(name: str, value: int, allowed: tuple[int, ...], when: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value}; allowed with {when}: {', '.join(map(str, allowed))}.")


def check_cache_mode(cache_mode: str, kv_cache_quant_mode: int) -> None:
    check_choice("cache_mode", cache_mode, tuple(CACHE_MODES))
    plain = ("PA_BSND", "BSND", "TND", "Norm")
    if kv_cache_quant_mode == PER_TILE and cache_mode not in plain:
        raise ValueError(
            f"cache_mode is {cache_mode!r}; allowed with kv_cache_quant_mode 3: {', '.join(map(repr, plain))}."
        )


def check_types(a: Prolog) -> None:
    """Check that everything that is neither int8 nor free has the dtype of weight_uk."""
    check_dtype("weight_uk", a.weight_uk, PACKED if a.kv_cache_quant_mode == PER_TILE else FLOATS)
    quantised = {"weight_uq_qr": a.weight_quant_mode > 0, "kv_cache": a.kv_cache_quant_mode > 0}
    quantised |= dict.fromkeys(("token_x", "weight_dq", "weight_dkv_kr"), a.weight_quant_mode == 2)
    if a.kv_cache_quant_mode != PER_TILE:
        quantised["kr_cache"] = a.kv_cache_quant_mode == PER_CHANNEL
    when = f"weight_quant_mode {a.weight_quant_mode} and kv_cache_quant_mode {a.kv_cache_quant_mode}"
    for name, integers in quantised.items():
        tensor, wanted = getattr(a, name), torch.int8 if integers else a.weight_uk.dtype
        if tensor.dtype != wanted:
            like = "" if integers else ", the dtype of weight_uk,"
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {wanted}{like} with {when}.")
    check_dtypes(a, dict.fromkeys(("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos"), FLOATS))


def check_shapes(a: Prolog) -> Sizes:
    """Check everything except scales and caches."""
    sizes: Sizes = {}
    weights = {"weight_uk": "N, D, Hckv", "weight_dq": "He, Hcq", "weight_dkv_kr": "He, Hckv+Dr"}
    check_letters(a, sizes, token_x=CACHE_MODES[a.cache_mode][0], **weights)
    sizes["Dr"] = width = sizes["Hckv+Dr"] - sizes["Hckv"]
    check_multiple("The rope width Dr, the columns of weight_dkv_kr after Hckv,", width, 2, "even and at least 2")
    sizes["N*(D+Dr)"] = sizes["N"] * (sizes["D"] + width)
    check_letters(a, sizes, weight_uq_qr="Hcq, N*(D+Dr)", rmsnorm_gamma_cq="Hcq", rmsnorm_gamma_ckv="Hckv")
    letters = "B, S, Dr" if "B" in sizes else "T, Dr"
    check_letters(a, sizes, rope_sin=letters, rope_cos=letters)
    return sizes


def check_scales(a: Prolog, sizes: Sizes) -> None:
    """Check that each scale is given exactly in the modes that read it, in float32, or float64 for float64, and in its
    shape."""
    some, full = a.weight_quant_mode > 0, a.weight_quant_mode == 2
    per_channel = a.kv_cache_quant_mode == PER_CHANNEL
    sizes["B*S"] = math.prod(a.token_x.shape[:-1])
    scales = {
        "dequant_scale_x": (full, "B*S, 1" if "B" in sizes else "T, 1"),
        "dequant_scale_w_dq": (full, "1, Hcq"),
        "dequant_scale_w_uq_qr": (some, "1, N*(D+Dr)"),
        "dequant_scale_w_dkv_kr": (full, "1, Hckv+Dr"),
        "quant_scale_ckv": (a.kv_cache_quant_mode in (PER_TENSOR, PER_CHANNEL), "1, Hckv" if per_channel else "1"),
        "quant_scale_ckr": (per_channel, "1, Dr"),
        "smooth_scales_cq": (some and a.smooth_scales_cq is not None, "1, Hcq"),
        "k_nope_clip_alpha": (a.kv_cache_quant_mode == PER_TILE, "1"),
    }
    when = f"weight_quant_mode {a.weight_quant_mode} and kv_cache_quant_mode {a.kv_cache_quant_mode}"
    for name, (wanted, letters) in scales.items():
        if check_optional(name, getattr(a, name), wanted, when):
            check_dtype(name, getattr(a, name), scale_dtypes(a.weight_uk.dtype))
            check_letters(a, sizes, **{name: letters})


def check_caches(a: Prolog, sizes: Sizes) -> None:
    letters, rank = CACHE_MODES[a.cache_mode][1], sizes["Hckv"]
    if a.kv_cache_quant_mode == PER_TILE:
        check_multiple("Hckv, the width of weight_uk,", rank, TILE, f"a multiple of {TILE} with kv_cache_quant_mode 3")
        width = stored_key(a.weight_uk.dtype).itemsize
        packed = f"Hckv+{width}*Dr+Hckv/{TILE}*4"
        sizes[packed] = rank + width * sizes["Dr"] + 4 * (rank // TILE)
        check_letters(a, sizes, kv_cache=f"{letters}, {packed}", kr_cache="0")
        check_layout("kv_cache", a.kv_cache, a.cache_mode)
        return
    check_letters(a, sizes, kv_cache=f"{letters}, Hckv", kr_cache=f"{letters}, Dr")
    check_layout("kv_cache", a.kv_cache, a.cache_mode)
    check_layout("kr_cache", a.kr_cache, a.cache_mode)


def check_layout(name: str, cache: Tensor, cache_mode: str) -> None:
    """Check that pages are dense and have the vendor's sizes and, in FRACTAL_NZ, whole fractals."""
    check_dense_pages(name, cache)
    if not cache_mode.startswith("PA"):
        return
    block_size, width = cache.shape[1], cache.shape[3]
    allowed = "a multiple of 16 from 16 to 1024"
    check_multiple(f"BlockSize, axis 1 of {name},", block_size, 16, allowed)
    if statically_known_true(block_size > 1024):
        raise ValueError(f"BlockSize, axis 1 of {name}, is {block_size}; it must be {allowed}.")
    if cache_mode.endswith("NZ"):
        fractal = 32 // cache.element_size()
        check_multiple(
            f"The width of {name}",
            width,
            fractal,
            f"a multiple of {fractal} in pages of {cache.dtype} and {cache_mode!r}",
        )


def check_position(a: Prolog) -> None:
    """Check cache_index and actual_seq_len, if the cache mode has them."""
    *tokens, _ = a.token_x.shape
    by_block = "BLK" in a.cache_mode
    when = f"cache_mode {a.cache_mode!r}"
    ragged = by_block and len(tokens) == 1
    check_optional("actual_seq_len", a.actual_seq_len, ragged, f"{when} and token_x of rank {len(tokens) + 1}")
    if a.actual_seq_len is not None:
        check_lengths(a.actual_seq_len, tokens[0])
    indexed = a.cache_mode == "Norm" or a.cache_mode.startswith("PA")
    check_optional("cache_index", a.cache_index, indexed, when)
    if a.cache_index is None:
        return
    check_dtype("cache_index", a.cache_index, (torch.int64,))
    if a.cache_mode == "Norm":
        check_shape("cache_index", a.cache_index, "B, S", tokens, broadcast=True)
        check_slots(a.cache_index, a.kv_cache.shape[2])
        return
    blocks, block_size = a.kv_cache.shape[:2]
    if a.actual_seq_len is not None:
        count = pages(a.actual_seq_len, block_size)
        check_shape("cache_index", a.cache_index, "sum of ceil(length/BlockSize)", (count,))
    elif by_block:
        each = page_count(tokens[1], block_size)
        check_shape("cache_index", a.cache_index, "B, ceil(S/BlockSize)", (tokens[0], each))
    else:
        check_shape("cache_index", a.cache_index, "B, S" if len(tokens) == 2 else "T", tokens)
    if by_block:
        check_slots(a.cache_index, blocks, "blocks")
    else:
        check_slots(a.cache_index, blocks * block_size)


def check_lengths(ends: Tensor, count: int) -> None:
    """Check the sums of lengths up to each sequence, of `count` tokens in all."""
    check_rank("actual_seq_len", ends, "B")
    check_dtype("actual_seq_len", ends, INTEGERS)
    if not readable(ends):
        return
    values = [0, *ends.tolist()]
    if values != sorted(values) or known_to_differ(values[-1], count):
        raise ValueError(
            f"actual_seq_len is {values[1:]}; it must hold the sums of lengths up to each sequence, "
            f"not decreasing and {count}, the number of tokens, in the end."
        )


def pages(ends: Tensor, block_size: int) -> int | None:
    """The number of pages that sequences with these ends fill, each starting a new page; None if the ends cannot be
    read."""
    if not readable(ends):
        return None
    lengths = ends.diff(prepend=ends.new_zeros(1))
    return int(((lengths + block_size - 1) // block_size).sum())


def check_slots(index: Tensor, slots: int, of: str = "slots") -> None:
    """Whether the cache has slots; without slots nothing is stored, for any index."""
    if not statically_known_true(slots == 0):
        check_index("cache_index", index, slots, of)


# --- mla_prolog ------------------------------------------------------------------------------------------------------


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
    check_v3(as_v3(a))


def as_v3(a: Arguments) -> V3Arguments:
    """Arguments of mla_prolog for mla_prolog_v3, whose check takes int8 weights of uq_qr, and whose body takes all."""
    has_codes, is_int8 = (tensor.dtype == torch.int8 for tensor in (a.kv_cache, a.weight_uq_qr))
    return V3Arguments(**vars(a), weight_quant_mode=int(is_int8), kv_cache_quant_mode=2 * has_codes)


def check_unquantized(a: Arguments) -> None:
    for name in RESERVED_BUT_READ:
        check_optional(name, getattr(a, name), False, f"a weight_uq_qr of {a.weight_uq_qr.dtype}")
    free = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
    check_tensors(vars(a), free=free, skip=("cache_index",))
    check_choice("cache_mode", a.cache_mode, FIRST_MODES)
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
        check_layout("kv_cache", a.kv_cache, a.cache_mode)
        check_layout("kr_cache", a.kr_cache, a.cache_mode)
    check_position(as_v3(a))
