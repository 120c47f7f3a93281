"""Lowers lightning_index to torch_npu.npu_lightning_indexer (LightningIndexer in graphs).

The source is op-plugin's document of that operator (August 2026), and lightning_indexer_tiling.cpp of
ops-transformer.

SparseFlashAttention takes keys and lengths alike: rows [B, T, 1, D] or pages of them, and lengths as tensors on the
device, so that a captured graph reads them at each replay."""

from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.sizes import largest
from mla_fx.ops.emitted import lightning_index
from mla_fx.ops.emitted.attention.pages import context_of, from_start
from mla_fx.ops.emitted.lightning_index import Arguments
from mla_fx.target import Compiled

from .. import limits
from ..limits import A2, A3, Surface

OPERATOR = "lightning_index"
KERNEL = "LightningIndexer"

CHIPS = (A2, A3)
WIDTH = 128
MOST_HEADS = 64
COUNTS = (*range(1, 2049), *range(3072, 8193, 1024))

# Also of SparseFlashAttention.
PAGES = range(16, 1025, 16)
ALL, RIGHT_DOWN = 0, 3  # the sparse modes in which a row sees all keys, or one less than the row after it


def lower(surface: Surface, a: Arguments) -> Compiled:
    limits.chip(surface, KERNEL, CHIPS)
    limits.size("query has D", a.query.shape[3], KERNEL, (WIDTH,))
    limits.between("query has N", a.query.shape[2], KERNEL, 1, MOST_HEADS)
    limits.dtype("query", a.query, KERNEL, limits.HALVES)
    limits.dtype("weights", a.weights, KERNEL, (a.query.dtype, torch.float32))
    refuse_counts(a)
    if a.scale <= 0:
        raise NoMatch(f"scale is {a.scale:.6g}; {KERNEL} takes none, and leaving out a positive one changes no choice")
    if a.key_scale is not None:
        raise NoMatch(f"key_scale is a tensor; {KERNEL} takes keys without scales")
    if a.fill is not None:
        raise NoMatch(f"hidden scores are {a.fill:.6g}; {KERNEL} takes minus infinity")
    if a.mask is not None:
        takes = f"{KERNEL} takes the length of each sequence, and the mask is not provably causal"
        raise NoMatch(f"mask is a tensor; {takes}")
    if a.block_table is not None:
        limits.page_size("key", a.key.shape[1], KERNEL, PAGES)
    return plain


def refuse_counts(a: Arguments) -> None:
    count, context = a.sparse_count, context_of(a.key, a.block_table)
    if largest(count) not in COUNTS:
        takes = "a number up to 2048, or a multiple of 1024 up to 8192"
        raise NoMatch(f"sparse_count is {count}; {KERNEL} takes {takes}")
    if not limits.holds(count <= context):
        raise NoMatch(f"sparse_count is {count}, of {context} keys; {KERNEL} names no key where there are fewer")


def plain(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    """The results of `mla_fx.lightning_index`.

    The kernel names keys as far as a sequence is long. After its end there are others, which are hidden, the last one
    of the context among them. It returns no scores in graphs; unless they are read, their computation is dead code."""
    key, table = keys_of(a.key, a.block_table)
    lengths, mode = key_lengths(a, a.key)
    count = largest(a.sparse_count)
    assert count is not None, "others were refused"
    indices, _ = torch.ops.npu.npu_lightning_indexer(
        a.query.contiguous(),
        key,
        a.weights.contiguous(),
        actual_seq_lengths_key=lengths,
        block_table=table,
        layout_query="BSND",
        layout_key="BSND" if table is None else "PA_BSND",
        sparse_count=count,
        sparse_mode=mode,
    )
    indices = indices[..., : a.sparse_count]
    last = context_of(a.key, a.block_table) - 1
    named = indices if lengths is None else torch.where(indices < 0, last, indices)
    return named, lightning_index.body(a)[1]


# --- keys and lengths, also for SparseFlashAttention -----------------------------------------------------------------


def key_lengths(a: Any, cache: Tensor) -> tuple[Tensor | None, int]:
    """The number of keys that the last row of each sequence sees, int32 [B], and the sparse mode. None means all."""
    batch, context = a.query.shape[0], context_of(cache, a.block_table)
    if a.context_lens is not None:
        return a.context_lens.clamp(0, context).expand(batch).to(torch.int32), RIGHT_DOWN
    if a.block_table is None:
        return None, ALL
    return torch.full((batch,), context, dtype=torch.int32, device=cache.device), ALL


def keys_of(cache: Tensor, block_table: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows or pages with an axis for the only head, and the table with every block counted from the start."""
    keys = cache.contiguous().unsqueeze(2)
    if block_table is None:
        return keys, None
    return keys, from_start(block_table, cache.shape[0]).to(torch.int32)
