"""Which arguments multi_latent_attention takes, and what its results look like."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mla_fx.ops.common.check import (
    FLOATS,
    INTEGERS,
    check_devices,
    check_dtype,
    check_optional,
    check_rank,
    check_shape,
    enumerator,
    known_to_differ,
    readable,
)
from mla_fx.ops.common.paged import TILE, host_lengths

RANK, ROPE = 512, 64
HEAD_COUNTS = (8, 16, 32, 64, 128)
MAX_BATCH, MAX_STEPS = 8192, 4

SPEC_MASK, FREE_MASK = "mask_type_spec", "mask_type_free"
SPEC, RING = "calc_type_spec", "calc_type_ring"
INT8, MERGED = "int8_nzcache", "kvcache"

_PLAIN, _NZ = "BlockNum, BlockSize, KvHeads", "BlockNum, width/n0, BlockSize, n0"
# For each cache mode, the axes and sizes of ctkv and of k_rope; every block holds one tile.
CACHES: Mapping[str, tuple[tuple[str, tuple[int | None, ...]], ...]] = {
    "krope_ctkv": ((f"{_PLAIN}, Hckv", (None, TILE, 1, RANK)), (f"{_PLAIN}, Dr", (None, TILE, 1, ROPE))),
    "nzcache": ((_NZ, (None, RANK // 16, TILE, 16)), (_NZ, (None, ROPE // 16, TILE, 16))),
    INT8: ((_NZ, (None, RANK // 32, TILE, 32)), (_NZ, (None, ROPE // 16, TILE, 16))),
    MERGED: ((f"{_PLAIN}, Hckv+Dr", (None, TILE, 1, RANK + ROPE)),),
}


class Modes(NamedTuple):
    mask: str
    calc: str
    cache: str


class Result(NamedTuple):
    letters: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def modes(mask_type: str, calc_type: str, cache_mode: str) -> Modes:
    """The three enumerators as torch_npu spells them; the document's MASK_TYPE_MASK_FREE is mask_type_free."""
    if mask_type.lower() in ("mask_type_mask_free", "mask_free"):
        mask_type = FREE_MASK
    return Modes(
        enumerator("mask_type", mask_type, "mask_type_", ("undefined", SPEC_MASK, FREE_MASK)),
        enumerator("calc_type", calc_type, "calc_type_", ("calc_type_undefined", SPEC, RING)),
        enumerator("cache_mode", cache_mode, "", tuple(CACHES)),
    )


def is_causal(q_nope: Tensor, mask: Tensor | None) -> bool:
    """Whether rows see no keys behind their own without being told by a mask."""
    return mask is None and (q_nope.dtype == torch.int8 or statically_known_true(q_nope.shape[1] == 128))


def results(q_nope: Tensor, q_rope: Tensor | None, mode: Modes) -> dict[str, Result]:
    """The axes, shape and dtype of each result."""
    rows, heads, _ = q_nope.shape
    dtype = (q_nope if q_rope is None else q_rope).dtype
    lse_dtype = torch.float32 if mode.cache == INT8 else dtype
    lse = Result("T, H, 1", (rows, heads, 1), lse_dtype) if mode.calc == RING else Result("empty", (0,), lse_dtype)
    return {"atten_out": Result("T, H, Hckv", (rows, heads, RANK), dtype), "lse": lse}


def check(**arguments: Any) -> None:
    a = SimpleNamespace(**arguments)
    mode = modes(a.mask_type, a.calc_type, a.cache_mode)
    check_rank("q_nope", a.q_nope, "T, H, width")
    check_numbers(a)
    check_presence(a, mode)
    check_shapes(a, mode)
    check_dtypes(arguments, mode)
    check_lengths(a)
    check_mask(a, mode)
    for name, result in results(a.q_nope, a.q_rope, mode).items():
        if name in arguments:
            check_shape(name, arguments[name], result.letters, result.shape)
            check_dtype(name, arguments[name], (result.dtype,))


def check_numbers(a: SimpleNamespace) -> None:
    heads = a.q_nope.shape[1]
    if all(known_to_differ(heads, count) for count in HEAD_COUNTS):
        raise ValueError(f"q_nope has {heads} heads; allowed: {', '.join(map(str, HEAD_COUNTS))}.")
    if a.head_num != 0 and known_to_differ(a.head_num, heads):
        raise ValueError(f"head_num is {a.head_num}; it must be {heads}, the heads of q_nope, or 0.")
    if a.kv_head_num not in (0, 1):
        raise ValueError(f"kv_head_num is {a.kv_head_num}; it must be 1, or 0 for the same.")
    if not 0 < a.qk_scale <= 1:
        raise ValueError(f"qk_scale is {a.qk_scale}; it must be above 0 and at most 1.")


def check_presence(a: SimpleNamespace, mode: Modes) -> None:
    """Each optional tensor is given exactly where the modes want it."""
    for name in ("q_rope", "k_rope"):
        check_optional(name, getattr(a, name), mode.cache != MERGED, f"cache_mode {mode.cache!r}")
    for name in ("qk_descale", "pv_descale"):
        check_optional(name, getattr(a, name), mode.cache == INT8, f"cache_mode {mode.cache!r}")
    check_optional("q_seqlen", a.q_seqlen, mode.calc == SPEC, f"calc_type {mode.calc!r}")
    check_optional("mask", a.mask, mode.mask != "undefined", f"mask_type {mode.mask!r}")
    if mode.mask != "undefined" and mode.calc != SPEC:
        raise ValueError(f"mask_type is {mode.mask!r}; with calc_type {mode.calc!r} it must be 'undefined'.")


def check_shapes(a: SimpleNamespace, mode: Modes) -> None:
    rows, heads, _ = a.q_nope.shape
    merged = mode.cache == MERGED
    query, *key_rope = CACHES[mode.cache]
    check_shape("q_nope", a.q_nope, "T, H, Hckv+Dr" if merged else "T, H, Hckv", (rows, heads, RANK + ROPE * merged))
    check_shape("ctkv", a.ctkv, *query)
    for letters, (_, *sizes) in key_rope:
        check_shape("q_rope", a.q_rope, "T, H, Dr", (rows, heads, ROPE))
        check_shape("k_rope", a.k_rope, letters, (a.ctkv.shape[0], *sizes))
    check_rank("block_tables", a.block_tables, "B, MaxBlocks")
    batch = a.block_tables.shape[0]
    if statically_known_true(batch > MAX_BATCH):
        raise ValueError(f"block_tables has {batch} rows, one for each sequence; at most {MAX_BATCH} are allowed.")
    check_shape("context_lens", a.context_lens, "B", (batch,))
    if a.q_seqlen is not None:
        check_shape("q_seqlen", a.q_seqlen, "B", (batch,))
    elif known_to_differ(rows, batch):
        raise ValueError(f"q_nope has {rows} rows; with calc_type {mode.calc!r} it must have {batch}, one a sequence.")
    for name in ("qk_descale", "pv_descale") if mode.cache == INT8 else ():
        check_shape(name, getattr(a, name), "H", (heads,))


def check_dtypes(arguments: Mapping[str, Any], mode: Modes) -> None:
    """Also that all tensors lie on one device, except for the lengths."""
    quantized = mode.cache == INT8
    lead = "q_nope" if mode.cache == MERGED else "q_rope"
    check_dtype(lead, arguments[lead], (torch.float16, torch.bfloat16) if quantized else FLOATS)
    same: Sequence[torch.dtype] = (arguments[lead].dtype,)
    content = (torch.int8,) if quantized else same
    wanted = {"q_nope": content, "q_rope": same, "ctkv": content, "k_rope": same, "mask": same}
    wanted |= dict.fromkeys(("qk_descale", "pv_descale"), (torch.float32,))
    wanted |= dict.fromkeys(("block_tables", "context_lens", "q_seqlen"), INTEGERS)
    for name, allowed in wanted.items():
        if arguments[name] is not None:
            check_dtype(name, arguments[name], allowed)
    check_devices(arguments, lengths=("context_lens", "q_seqlen"))


def check_lengths(a: SimpleNamespace) -> None:
    """The values of q_seqlen, context_lens and of the entries of block_tables that are read."""
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


def check_mask(a: SimpleNamespace, mode: Modes) -> None:
    if mode.mask == SPEC_MASK:
        check_shape("mask", a.mask, "T, max(context_lens)", (a.q_nope.shape[0], None))
        if readable(a.context_lens) and a.mask.shape[1] != (widest := largest(a.context_lens)):
            raise ValueError(
                f"mask has shape {list(a.mask.shape)}; it must have {widest} columns, the largest of context_lens."
            )
    if mode.mask == FREE_MASK:
        check_corner(a.mask, a.block_tables.shape[0], a.q_seqlen)


def check_corner(mask: Tensor, batch: int, q_seqlen: Tensor) -> None:
    """The rows of the mask fit q_seqlen; without a batch axis all sequences must have the same."""
    letters = "125+2q, 128 or B, 125+2q, 128"
    check_rank("mask", mask, letters)
    check_shape("mask", mask, letters, (batch, None, TILE)[-mask.dim() :])
    if not readable(q_seqlen) or q_seqlen.numel() == 0:
        return
    if mask.dim() == 2 and int(q_seqlen.min()) != int(q_seqlen.max()):
        raise ValueError(
            f"mask has shape {list(mask.shape)} while q_seqlen holds {int(q_seqlen.min())} and {int(q_seqlen.max())}; "
            "sequences with different numbers of rows need a mask each, [B, 125+2q, 128]."
        )
    rows = 125 + 2 * largest(q_seqlen)
    if mask.shape[-2] != rows:
        raise ValueError(
            f"mask has shape {list(mask.shape)}; it must have 125+2q = {rows} rows, q the largest of q_seqlen."
        )


def largest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
