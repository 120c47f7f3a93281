"""The checks of the tensors that paged_attention computes with: shapes and dtypes of caches, scales and masks."""

import torch
from torch import Tensor

from mla_fx.ops.common.check import (
    FLOATS,
    check_dtype,
    check_dtypes,
    check_letters,
    check_multiple,
    check_rank,
    check_shape,
    known_to_differ,
)
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import (
    ALIBI,
    BNSD,
    DEQUANT_FUSION,
    MASK_FREE,
    NORM,
    NORM_COMPRESS,
    NZ_WIDTH,
    PLAIN_SCALE,
    SPEC,
    Arguments,
    Options,
)
from .masks import FREE_BLOCK, TABLE, is_nz

LENGTHS = ("context_lens", "batch_run_status", "q_seq_lens")

# Elements of one page of one head, and the widest head, if keys and values must be alike.
PAGE, HEAD = 128 * 128, 256
WIDEST = 576


def check_caches(a: Arguments, o: Options) -> None:
    quantized = o.fully_quantized or o.quant == DEQUANT_FUSION
    check_dtype("query", a.query, (torch.int8,) if o.fully_quantized else FLOATS)
    wanted = torch.int8 if quantized else a.query.dtype
    key_size = a.query.shape[2]
    check_cache("key_cache", a.key_cache, wanted, o, key_size)
    if a.value_cache is None:
        if statically_known_true(a.mla_v_head_size > key_size):
            raise ValueError(f"mla_v_head_size is {a.mla_v_head_size}; it must be at most {key_size}, the head size.")
        check_sizes(o, key_size, a.mla_v_head_size, block_size(a, o))
        return
    check_cache("value_cache", a.value_cache, wanted, o, key_size if o.nz or o.layout == BNSD else None)
    for axis, meaning in enumerate(("BlockNum", "axis 1", "axis 2")):
        if known_to_differ(a.value_cache.shape[axis], a.key_cache.shape[axis]):
            shown, keys = list(a.value_cache.shape), list(a.key_cache.shape)
            raise ValueError(f"value_cache has shape {shown}; its {meaning} must be that of key_cache {keys}.")
    check_sizes(o, key_size, key_size if o.nz else a.value_cache.shape[3], block_size(a, o))


def check_cache(name: str, cache: Tensor, dtype: torch.dtype, o: Options, size: int | None) -> None:
    """Check a cache; `size` is the head size, None for any."""
    check_dtype(name, cache, (dtype,))
    heads = 1 if o.compressed else o.kv_heads
    if o.nz and size is not None:
        check_multiple("The head size of query", size, NZ_WIDTH, "a multiple of 16 with NZ caches")
        bands = heads * size // NZ_WIDTH
        check_shape(name, cache, "BlockNum, Hkv*D/16, BlockSize, 16", (None, bands, None, NZ_WIDTH))
    elif o.layout == BNSD:
        check_shape(name, cache, "BlockNum, Hkv, BlockSize, D", (None, heads, None, size))
    else:
        check_shape(name, cache, "BlockNum, BlockSize, Hkv, D", (None, None, heads, size))


def block_size(a: Arguments, o: Options) -> int:
    return a.key_cache.shape[2 if o.nz or o.layout == BNSD else 1]


def check_sizes(o: Options, key_size: int, value_size: int, page: int) -> None:
    """The limits on head sizes and BlockSize `page`."""
    check_multiple("The BlockSize of key_cache", page, 16, "a multiple of 16")
    alike = o.nz or o.quant == DEQUANT_FUSION or o.compressed or o.scale != PLAIN_SCALE
    if not o.combined and (alike or o.parallel or o.fully_quantized):
        if key_size != value_size:
            raise ValueError(f"The head size of value_cache is {value_size}; it must be {key_size}, that of key_cache.")
        if key_size > HEAD or statically_known_true(key_size * page > PAGE):
            raise ValueError(
                f"The head size is {key_size} and BlockSize {page}; with this quant_type, calc_type, scale_type, "
                f"compress_type or cache format they must be at most {HEAD}, and their product at most {PAGE}."
            )
        if o.parallel and statically_known_true(key_size * o.heads > PAGE):
            raise ValueError(
                f"query has {o.heads} heads of size {key_size}; in parallel decoding H*D must be at most {PAGE}."
            )
        return
    widest = max(key_size, value_size)
    if widest > WIDEST:
        raise ValueError(f"The head size is {widest}; it must be at most {WIDEST}.")
    if is_wide_page(o, key_size, value_size, page):
        return
    if widest > HEAD and statically_known_true(page > 128):
        raise ValueError(f"BlockSize is {page}; it must be at most 128 with head size {widest}, more than {HEAD}.")
    if widest == HEAD and statically_known_true(page >= 128) and statically_known_true(page % 128 != 0):
        raise ValueError(f"BlockSize is {page}; it must be below 128 or a multiple of it with head size {HEAD}.")


def is_wide_page(o: Options, key_size: int, value_size: int, page: int) -> bool:
    """The only case with heads of 576 in pages of 256."""
    sized = o.combined and (key_size, value_size) == (576, 512) and not o.parallel
    return (
        sized and not known_to_differ(page, 256) and not (known_to_differ(o.heads, 16) and known_to_differ(o.heads, 32))
    )


def check_scales(a: Arguments, o: Options) -> None:
    """Check scales, offsets and the other small tensors."""
    letters, count = ("H", o.heads) if o.fully_quantized else ("Hkv*D", o.kv_heads * a.query.shape[2])
    check_dtypes(a, dict.fromkeys(("k_descale", "v_descale"), (torch.float32, torch.int64)))
    check_letters(a, {letters: count}, k_descale=letters, v_descale=letters)
    if a.k_descale is not None and a.v_descale is not None and a.k_descale.dtype != a.v_descale.dtype:
        raise ValueError(f"v_descale has dtype {a.v_descale.dtype}; it must be {a.k_descale.dtype}, as k_descale.")
    half = torch.float16 if o.nz else torch.float32
    double = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    scales = dict.fromkeys(("p_scale", "razor_offset"), (torch.float32,))
    offsets = dict.fromkeys(("k_offset", "v_offset"), (torch.int32,))
    check_dtypes(a, {**offsets, **scales, "log_n": tuple(dict.fromkeys((torch.float32, half, double)))})
    sizes = dict(zip(("BlockNum", "BlockSize"), a.key_cache.shape, strict=False)) | {letters: count}
    check_letters(a, sizes, k_offset=letters, v_offset=letters, p_scale=letters, razor_offset="BlockNum, BlockSize")
    if a.log_n is not None:
        check_shape("log_n", a.log_n, "B", a.context_lens.shape)


def check_mask(a: Arguments, o: Options, dtype: torch.dtype) -> None:
    """`dtype` is that of the result."""
    if a.mask is None:
        return
    check_dtype("mask", a.mask, (dtype,))
    batch = a.context_lens.shape[0] // o.tables_per_sequence
    if o.mask == MASK_FREE:
        check_shape("mask", a.mask, "1, 8, 128, 16", (1, FREE_BLOCK // NZ_WIDTH, FREE_BLOCK, NZ_WIDTH))
        if known_to_differ(block_size(a, o), FREE_BLOCK):
            raise ValueError(
                f"The BlockSize of key_cache is {block_size(a, o)}; it must be 128 with mask_type {MASK_FREE!r}."
            )
    elif o.mask == NORM_COMPRESS:
        check_table(a.mask)
    elif is_nz(a.mask, o):
        check_nz_mask(a.mask, o, batch, a.query.shape[0])
    else:
        check_nd_mask(a.mask, o, batch, a.query.shape[0])


def check_nd_mask(mask: Tensor, o: Options, batch: int, tokens: int) -> None:
    if o.mask == SPEC:
        check_shape("mask", mask, "T, S", (tokens, None))
    elif o.mask == ALIBI and mask.dim() == 4:
        heads = o.heads if known_to_differ(mask.shape[1], 1) else None
        check_shape("mask", mask, "B, H (1), 1, S", (batch, heads, 1, None))
    elif o.mask == ALIBI:
        check_rank("mask", mask, "H, 1, S or B, H, 1, S")
        check_shape("mask", mask, "H, 1, S", (o.heads, 1, None))
    elif mask.dim() == 3:
        check_shape("mask", mask, "B, 1, S", (batch, 1, None))
    else:
        check_rank("mask", mask, "S, S or B, 1, S")
        if known_to_differ(mask.shape[0], 1) and known_to_differ(mask.shape[0], mask.shape[1]):
            raise ValueError(f"mask has shape {list(mask.shape)}; it must be [1, S], [S, S] or [B, 1, S].")


def check_nz_mask(mask: Tensor, o: Options, batch: int, tokens: int) -> None:
    """Rows are padded to 16 if a mask has one row, and may be if it has one per token."""
    if o.mask == NORM:
        check_shape("mask", mask, "B, S/16, 16, 16", (batch, None, NZ_WIDTH, NZ_WIDTH), broadcast=True)
    elif o.mask == ALIBI and known_to_differ(mask.shape[0], o.heads):
        check_shape("mask", mask, "B*H, S/16, 16, 16", (batch * o.heads, None, NZ_WIDTH, NZ_WIDTH))
    elif o.mask == ALIBI:
        check_shape("mask", mask, "H, S/16, 16, 16", (o.heads, None, NZ_WIDTH, NZ_WIDTH))
    else:
        padded = -(-tokens // NZ_WIDTH) * NZ_WIDTH
        rows = tokens if known_to_differ(mask.shape[2], padded) else None
        check_shape("mask", mask, "1, S/16, T, 16", (1, None, rows, NZ_WIDTH))


def check_table(mask: Tensor) -> None:
    """The table of mask type NORM_COMPRESS."""
    bands = (1, TABLE // NZ_WIDTH, TABLE, NZ_WIDTH)
    allowed = ((TABLE, TABLE), (1, TABLE, TABLE), (1, 1, TABLE, TABLE), bands)
    for shape in allowed:
        if mask.dim() == len(shape) and not any(map(known_to_differ, mask.shape, shape)):
            return
    shown = ", ".join(str(list(shape)) for shape in allowed)
    raise ValueError(f"mask has shape {list(mask.shape)}; it must be one of {shown} with mask_type {NORM_COMPRESS!r}.")


def check_out(a: Arguments, out: Tensor | None, dtype: torch.dtype, value_size: int) -> None:
    if out is None:
        return
    check_dtype("attn_out", out, (dtype,))
    check_shape("attn_out", out, "T, H, Dv", (*a.query.shape[:2], value_size))
