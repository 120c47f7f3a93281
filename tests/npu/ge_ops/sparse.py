"""LightningIndexer and SparseFlashAttention, written from their documents and the limits of their host code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e12  # of a chosen key that comes after its query: such a key is not left out
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def LightningIndexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    return_values: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """The numbers of the keys with the largest scores, then -1. Hidden keys of a sequence are named, too, and last."""
    check_layouts(query, layout_query, layout_key, block_table, actual_seq_lengths_key, sparse_mode)
    _expect(query.shape[2] <= 64 and query.shape[3] == key.shape[3] == 128, "heads or widths")
    _expect(query.dtype == key.dtype and weights.dtype in (query.dtype, torch.float32), "dtypes")
    _expect(0 < sparse_count <= 2048 or (sparse_count % 1024 == 0 and sparse_count <= 8192), "sparse_count")
    _expect(not return_values and actual_seq_lengths_query is None, "options")
    batch, tokens = query.shape[:2]
    indices = torch.full((batch, tokens, 1, sparse_count), -1, dtype=torch.int32)
    for b, keys in enumerate(contexts(key, block_table, actual_seq_lengths_key, batch)):
        products = torch.einsum("snd,td->snt", query[b].float(), keys[:, 0].float()).relu()
        scores = torch.einsum("snt,sn->st", products, weights[b].float())
        hidden = _after(tokens, len(keys), sparse_mode)
        order = scores.masked_fill(hidden, -torch.inf).topk(min(sparse_count, len(keys))).indices
        indices[b, :, 0, : order.shape[-1]] = order
    return indices, query.new_zeros(0)


def SparseFlashAttention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    *,
    scale_value: float,
    query_rope: Tensor,
    key_rope: Tensor,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the keys that are named before the first -1."""
    check_layouts(query, layout_query, layout_kv, block_table, actual_seq_lengths_kv, sparse_mode)
    _expect(attention_mode == 2 and sparse_block_size == 1 and not return_softmax_lse, "options")
    _expect(actual_seq_lengths_query is None and torch.equal(key, value), "operands")
    _expect(query.shape[2] in HEADS and query.shape[3] == key.shape[3] == 512, "heads or widths")
    _expect(query_rope.shape[3] == key_rope.shape[3] == 64 and sparse_indices.dtype == torch.int32, "operands")
    out = torch.zeros_like(query)
    latents, keys = (contexts(x, block_table, None, len(query)) for x in (key, key_rope))
    for b, (values, rotated) in enumerate(zip(latents, keys, strict=True)):
        length = len(values) if actual_seq_lengths_kv is None else int(actual_seq_lengths_kv[b])
        hidden = torch.ones(query.shape[1], len(values), dtype=torch.bool)
        hidden[:, :length] = _after(query.shape[1], length, sparse_mode)
        for s, named in enumerate(sparse_indices[b, :, 0].long()):
            named = named[: int((named >= 0).long().cumprod(0).sum())]
            scores = query[b, s].float() @ values[named, 0].float().mT
            scores = scores + query_rope[b, s].float() @ rotated[named, 0].float().mT
            weights = (scores * scale_value).masked_fill(hidden[s, named], HIDDEN).softmax(-1).to(query.dtype)
            out[b, s] = (weights.float() @ values[named, 0].float()).to(query.dtype)
    return out, torch.zeros(0), torch.zeros(0)


def contexts(x: Tensor, block_table: Tensor | None, lengths: Tensor | None, batch: int) -> Iterator[Tensor]:
    """The rows [L, 1, D] of each sequence."""
    for b in range(batch):
        rows = x[b] if block_table is None else x[block_table[b].long()].flatten(0, 1)
        yield rows if lengths is None else rows[: int(lengths[b])]


def check_layouts(
    query: Tensor, layout: str, keys: str, table: Tensor | None, lengths: Tensor | None, mode: int
) -> None:
    _expect(layout == "BSND" and keys == ("BSND" if table is None else "PA_BSND"), "layouts")
    _expect(table is None or (table.dtype == torch.int32 and lengths is not None), "block_table")
    _expect(lengths is None or lengths.dtype == torch.int32, "lengths")
    _expect(mode in (0, 3) and query.dtype in (torch.bfloat16, torch.float16), "sparse_mode or dtype")


def _after(tokens: int, keys: int, mode: int) -> Tensor:
    hidden = torch.ones(tokens, keys, dtype=torch.bool)
    return hidden.triu(keys - tokens + 1) if mode == 3 else ~hidden


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"a kernel does not take these {what}")
