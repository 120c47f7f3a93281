"""The checks of multi_latent_attention's arguments."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mla_fx.ops.common.check import (
    FLOATS,
    INTEGERS,
    check_devices,
    check_dtype,
    check_dtypes,
    check_letters,
    check_optional,
    check_rank,
    check_shape,
    known_to_differ,
    readable,
)
from mla_fx.ops.common.paged import TILE, host_lengths
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import (
    FREE_MASK,
    INT8,
    MERGED,
    NO_MASK,
    NZ,
    RANK,
    RING,
    ROPE,
    SPEC,
    SPEC_MASK,
    SPLIT,
    Arguments,
    Modes,
    is_causal,
    modes,
    results,
)

HEAD_COUNTS = (8, 16, 32, 64, 128)
MAX_BATCH, MAX_STEPS = 8192, 4

Layout = tuple[str, tuple[int | None, ...]]

_PLAIN, _NZ = "BlockNum, BlockSize, KvHeads", "BlockNum, width/n0, BlockSize, n0"
# The axes and sizes of ctkv and k_rope per cache mode; every block holds one tile.
LATENTS: Mapping[str, Layout] = {
    SPLIT: (f"{_PLAIN}, Hckv", (None, TILE, 1, RANK)),
    NZ: (_NZ, (None, RANK // 16, TILE, 16)),
    INT8: (_NZ, (None, RANK // 32, TILE, 32)),
    MERGED: (f"{_PLAIN}, Hckv+Dr", (None, TILE, 1, RANK + ROPE)),
}
ROPES: Mapping[str, Layout] = {
    SPLIT: (f"{_PLAIN}, Dr", (None, TILE, 1, ROPE)),
    NZ: (_NZ, (None, ROPE // 16, TILE, 16)),
    INT8: (_NZ, (None, ROPE // 16, TILE, 16)),
}


def check(a: Arguments, *, atten_out: Tensor | None = None, lse: Tensor | None = None) -> None:
    mode = modes(a)
    check_rank("q_nope", a.q_nope, "T, H, width")
    check_numbers(a)
    check_presence(a, mode)
    check_mask_is_read(a, mode)
    check_shapes(a, mode)
    check_types(a, mode)
    check_devices(vars(a) | {"atten_out": atten_out, "lse": lse}, lengths=("context_lens", "q_seqlen"))
    check_lengths(a)
    check_mask(a, mode)
    for name, output, result in zip(("atten_out", "lse"), (atten_out, lse), results(a, mode), strict=True):
        if output is not None:
            check_shape(name, output, result.letters, result.shape)
            check_dtype(name, output, (result.dtype,))
    if atten_out is not None and mode.calc == RING:
        check_optional("lse", lse, True, f"calc_type {RING!r}")


def check_numbers(a: Arguments) -> None:
    heads = a.q_nope.shape[1]
    if all(known_to_differ(heads, count) for count in HEAD_COUNTS):
        raise ValueError(f"q_nope has {heads} heads; allowed: {', '.join(map(str, HEAD_COUNTS))}.")
    if a.head_num != 0 and known_to_differ(a.head_num, heads):
        raise ValueError(f"head_num is {a.head_num}; it must be {heads}, the heads of q_nope, or 0.")
    if a.kv_head_num not in (0, 1):
        raise ValueError(f"kv_head_num is {a.kv_head_num}; it must be 1, or 0 for the same.")
    if not 0 < a.qk_scale <= 1:
        raise ValueError(f"qk_scale is {a.qk_scale}; it must be above 0 and at most 1.")


def check_presence(a: Arguments, mode: Modes) -> None:
    """Check that each optional tensor is given exactly if the modes require it."""
    of_cache = f"cache_mode {mode.cache!r}"
    check_optional("q_rope", a.q_rope, mode.cache != MERGED, of_cache)
    check_optional("k_rope", a.k_rope, mode.cache != MERGED, of_cache)
    check_optional("qk_descale", a.qk_descale, mode.cache == INT8, of_cache)
    check_optional("pv_descale", a.pv_descale, mode.cache == INT8, of_cache)
    check_optional("q_seqlen", a.q_seqlen, mode.calc == SPEC, f"calc_type {mode.calc!r}")
    check_optional("mask", a.mask, mode.mask != NO_MASK, f"mask_type {mode.mask!r}")


def check_mask_is_read(a: Arguments, mode: Modes) -> None:
    if mode.mask == NO_MASK:
        return
    if mode.calc != SPEC:
        raise ValueError(f"mask_type is {mode.mask!r}; with calc_type {mode.calc!r} it must be {NO_MASK!r}.")
    if is_causal(a.q_nope):
        reason = "an int8 q_nope" if a.q_nope.dtype == torch.int8 else "128 heads"
        raise ValueError(
            f"mask_type is {mode.mask!r}; with {reason} it must be {NO_MASK!r}: the kernel is causal and reads no mask."
        )


def check_shapes(a: Arguments, mode: Modes) -> None:
    rows, heads, _ = a.q_nope.shape
    sizes = {"T": rows, "H": heads, "Hckv": RANK, "Dr": ROPE, "Hckv+Dr": RANK + ROPE}
    check_letters(a, sizes, q_nope="T, H, Hckv+Dr" if mode.cache == MERGED else "T, H, Hckv")
    check_shape("ctkv", a.ctkv, *LATENTS[mode.cache])
    check_letters(a, sizes, q_rope="T, H, Dr")
    if a.k_rope is not None:
        letters, (_, *page) = ROPES[mode.cache]
        check_shape("k_rope", a.k_rope, letters, (a.ctkv.shape[0], *page))
    check_letters(a, sizes, block_tables="B, MaxBlocks")
    batch = sizes["B"]
    if statically_known_true(batch > MAX_BATCH):
        raise ValueError(f"block_tables has {batch} rows, one for each sequence; at most {MAX_BATCH} are allowed.")
    check_letters(a, sizes, context_lens="B", q_seqlen="B")
    if a.q_seqlen is None and known_to_differ(rows, batch):
        raise ValueError(f"q_nope has {rows} rows; with calc_type {mode.calc!r} it must have {batch}, one a sequence.")
    check_letters(a, sizes, qk_descale="H", pv_descale="H")


def check_types(a: Arguments, mode: Modes) -> None:
    name, lead = ("q_nope", a.q_nope) if a.q_rope is None else ("q_rope", a.q_rope)
    check_dtype(name, lead, (torch.float16, torch.bfloat16) if mode.cache == INT8 else FLOATS)
    same = (lead.dtype,)
    content = (torch.int8,) if mode.cache == INT8 else same
    wanted: dict[str, Sequence[torch.dtype]]
    wanted = {"q_nope": content, "q_rope": same, "ctkv": content, "k_rope": same, "mask": same}
    wanted |= dict.fromkeys(("qk_descale", "pv_descale"), (torch.float32,))
    wanted |= dict.fromkeys(("block_tables", "context_lens", "q_seqlen"), INTEGERS)
    check_dtypes(a, wanted)


def check_lengths(a: Arguments) -> None:
    """Check the values of q_seqlen, context_lens and the entries of block_tables that are read."""
    if a.q_seqlen is not None and readable(a.q_seqlen):
        check_steps(host_lengths(a.q_seqlen), a.q_nope.shape[0])
    if not readable(a.context_lens):
        return
    context = host_lengths(a.context_lens)
    room = a.block_tables.shape[1] * TILE
    wrong = context[(context < 0) | (context > room)]
    if len(wrong):
        raise ValueError(
            f"context_lens holds {int(wrong[0])}; it must be 0 to {room}, {TILE} for each column of block_tables."
        )
    if readable(a.block_tables):
        check_blocks(a.block_tables.cpu(), context, a.ctkv.shape[0])


def check_steps(steps: Tensor, rows: int) -> None:
    wrong = steps[(steps < 1) | (steps > MAX_STEPS)]
    if len(wrong):
        raise ValueError(f"q_seqlen holds {int(wrong[0])}; it must be 1 to {MAX_STEPS}.")
    if int(steps.sum()) != rows:
        raise ValueError(f"q_seqlen sums to {int(steps.sum())}; it must sum to {rows}, the rows of q_nope.")


def check_blocks(tables: Tensor, context: Tensor, blocks: int) -> None:
    read = torch.arange(tables.shape[1]) * TILE < context.unsqueeze(-1)
    wrong = tables[read & ((tables < 0) | (tables >= blocks))]
    if len(wrong):
        raise ValueError(
            f"block_tables holds {int(wrong[0])} within a context; it must be 0 to {blocks - 1}, a block of ctkv."
        )


def check_mask(a: Arguments, mode: Modes) -> None:
    if a.mask is None or a.q_seqlen is None:
        return
    if mode.mask == SPEC_MASK:
        check_shape("mask", a.mask, "T, max(context_lens)", (a.q_nope.shape[0], None))
        if readable(a.context_lens) and a.mask.shape[1] != (widest := largest(a.context_lens)):
            raise ValueError(
                f"mask has shape {list(a.mask.shape)}; it must have {widest} columns, the largest of context_lens."
            )
    if mode.mask == FREE_MASK:
        check_corner(a.mask, a.block_tables.shape[0], a.q_seqlen)


def check_corner(mask: Tensor, batch: int, q_seqlen: Tensor) -> None:
    """Check that the rows of the mask fit the largest of q_seqlen."""
    letters = "125+2q, 128 or B, 125+2q, 128"
    check_rank("mask", mask, letters)
    check_shape("mask", mask, letters, (batch, None, TILE)[-mask.dim() :])
    if not readable(q_seqlen) or q_seqlen.numel() == 0:
        return
    rows = 125 + 2 * largest(q_seqlen)
    if mask.shape[-2] != rows:
        raise ValueError(
            f"mask has shape {list(mask.shape)}; it must have 125+2q = {rows} rows, q the largest of q_seqlen."
        )


def largest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
