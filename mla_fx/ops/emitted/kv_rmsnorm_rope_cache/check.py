"""The checks of kv_rmsnorm_rope_cache's arguments."""

import torch
from torch import Tensor

from mla_fx.ops.common.cache import of_pages, page_count, page_shape
from mla_fx.ops.common.check import (
    Sizes,
    check_choice,
    check_dense_pages,
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
    scale_dtypes,
)
from mla_fx.ops.common.math import check_rope
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import Arguments

CACHE_MODES = ("Norm", "BNSD", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ", "NZ")
PLAIN_MODES = CACHE_MODES[:4]
CONTIGUOUS_MODES = CACHE_MODES[:2]
HEADS = (1, 2, 4, 8)
# Each cache, and the prefix of its scale and offset.
CACHES = {"k_cache": "k_rope", "ckv_cache": "c_kv"}


def check(a: Arguments) -> None:
    wide = scale_dtypes(a.kv.dtype)
    scales = {f"{row}_{part}": wide for row in CACHES.values() for part in ("scale", "offset")}
    own = {"index": (torch.int64,), **dict.fromkeys(CACHES, (a.kv.dtype, torch.int8)), **scales}
    check_tensors(vars(a), free=("gamma", "cos", "sin"), skip=own)
    check_dtypes(a, own)
    check_choice("cache_mode", a.cache_mode, CACHE_MODES)
    if a.is_output_kv and a.cache_mode in CONTIGUOUS_MODES:
        raise ValueError(
            f"is_output_kv is True; it must be False with cache_mode {a.cache_mode!r}, where the kernel ignores it."
        )
    if a.cache_mode == "NZ":
        check_optional("v", a.v, False, f"cache_mode {a.cache_mode!r}")
        check_fractals("k_cache", a.k_cache, "Dr")
        check_fractals("ckv_cache", a.ckv_cache, "Hckv")
        a = of_pages(a, *CACHES, form=page_shape)
    widths = check_without_v(a) if a.v is None else check_with_v(a)
    check_caches(a, *widths)
    for name, width in zip(CACHES, widths, strict=True):
        check_quantisation(a, name, width)
    for name, width in zip(CACHES, widths, strict=True):
        if has_sized_pages(a):
            check_page(a, name, width)
        if a.cache_mode.endswith("NZ") or a.v is not None:
            check_dense_pages(name, getattr(a, name))
    check_positions(a)


def check_without_v(a: Arguments) -> tuple[int, int]:
    """The widths Dr and Hckv."""
    check_letters(a, {}, kv="B, 1, S, Hckv+Dr", gamma="Hckv")
    rank = a.gamma.shape[0]
    width = a.kv.shape[-1] - rank
    check_tables(a, width)
    return width, rank


def check_with_v(a: Arguments) -> tuple[int, int]:
    """The widths Dk and Dv."""
    if a.kc_scale != 1.0:
        raise ValueError(f"kc_scale is {a.kc_scale}; it must be 1.0 with v, whose rows are stored as they are.")
    sizes: Sizes = {}
    check_letters(a, sizes, kv="B, N, S, Dk")
    if all(known_to_differ(sizes["N"], heads) for heads in HEADS):
        raise ValueError(f"kv has {sizes['N']} heads; allowed with v: {', '.join(map(str, HEADS))}.")
    check_letters(a, sizes, gamma="Dk", v="B, N, S, Dv")
    width = total = sizes["Dk"]
    for name, table in {"cos": a.cos, "sin": a.sin}.items():
        if table is not None:
            check_rank(name, table, "B, 1, S, Dr")
            width = table.shape[-1]
    check_tables(a, width)
    if width > total:
        raise ValueError(f"cos has {width} columns; at most the {total} of kv can be rotated.")
    return total, sizes["Dv"]


def check_tables(a: Arguments, width: int) -> None:
    batch, _, steps, _ = a.kv.shape
    table = a.sin if a.cos is None else a.cos
    one = table is not None and table.dim() == 4 and statically_known_true(table.shape[2] == 1)
    if one and not has_sized_pages(a):
        steps = 1
    check_rope(width, a.rope_layout, "B, 1, S, Dr", (batch, 1, steps, width), cos=a.cos, sin=a.sin)


def check_caches(a: Arguments, k_width: int, ckv_width: int) -> None:
    batch, heads, steps, _ = a.kv.shape
    n, k, ckv = ("1", "Dr", "Hckv") if a.v is None else ("N", "Dk", "Dv")
    letters = {"Norm": f"B, {n}, T", "BNSD": f"B, {n}, S"}.get(a.cache_mode, f"BlockNum, BlockSize, {n}")
    sizes = {"B": batch, "N": heads, "S": steps, k: k_width, ckv: ckv_width}
    check_letters(a, sizes, k_cache=f"{letters}, {k}", ckv_cache=f"{letters}, {ckv}")


def is_quantised(a: Arguments) -> bool:
    return torch.int8 in (a.k_cache.dtype, a.ckv_cache.dtype)


def has_sized_pages(a: Arguments) -> bool:
    """Whether BlockSize is limited."""
    is_plain = a.cache_mode in PLAIN_MODES and not is_quantised(a)
    return a.cache_mode not in CONTIGUOUS_MODES and not is_plain


def check_quantisation(a: Arguments, name: str, width: int) -> None:
    """Check that an int8 cache has a scale and at most an offset, and that any other cache has neither."""
    cache: Tensor = getattr(a, name)
    scale, offset = f"{CACHES[name]}_scale", f"{CACHES[name]}_offset"
    if getattr(a, offset) is not None and getattr(a, scale) is None:
        raise ValueError(f"{offset} is given and {scale} is None; an offset needs its scale.")
    if getattr(a, offset) is not None and a.v is None:
        raise ValueError(f"{offset} is given; it must be None without v, where the kernel ignores it.")
    if check_optional(scale, getattr(a, scale), cache.dtype == torch.int8, f"{name} of dtype {cache.dtype}"):
        letters = "D or 1, D" if a.v is None else "N, D"
        check_letters(a, {"N": a.kv.shape[1], "D": width}, **{scale: letters, offset: letters})


def check_page(a: Arguments, name: str, width: int) -> None:
    cache: Tensor = getattr(a, name)
    rows = 32 if is_quantised(a) else 16
    caches = " and ".join(str(getattr(a, each).dtype) for each in CACHES)
    allowed = f"a multiple of {rows} with cache_mode {a.cache_mode!r} and caches of {caches}"
    check_multiple(f"BlockSize, axis 1 of {name},", cache.shape[1], rows, allowed)
    if a.cache_mode.endswith("NZ"):
        lanes = 32 // cache.element_size()
        check_multiple(
            f"The width of {name}", width, lanes, f"a multiple of {lanes}, as many {cache.dtype} as are 32 bytes"
        )


def check_positions(a: Arguments) -> None:
    """Check index and, with PA_BLK_*, the number of pages."""
    batch, _, steps, _ = a.kv.shape
    blocks, block_size, room, _ = a.k_cache.shape
    check_optional("index", a.index, a.cache_mode != "BNSD", f"cache_mode {a.cache_mode!r}")
    if a.index is None:
        return
    if a.cache_mode == "Norm":
        check_shape("index", a.index, "B, S", (batch, steps), broadcast=True)
        check_index("index", a.index, room)
        return
    if "BLK" not in a.cache_mode:
        check_shape("index", a.index, "B*S", (batch * steps,))
        check_index("index", a.index, blocks * block_size)
        return
    pages = batch * page_count(steps, block_size)
    check_shape("index", a.index, "B*Ceil(S/BlockSize)", (pages,))
    if statically_known_true(blocks < pages):
        raise ValueError(f"k_cache has {blocks} blocks; {a.cache_mode!r} needs B*Ceil(S/BlockSize) = {pages} or more.")
    check_index("index", a.index, blocks * block_size)
