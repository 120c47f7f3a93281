"""Attention of absorbed queries over the latents themselves, or over chosen ones."""

import torch
from torch import Tensor

from mla_fx.ops.common.math import accumulation_dtype, wide_product

from .arguments import Arguments, Results
from .chosen_rows import over_rows
from .codes import dequantised, dtype_of
from .pages import context_of, latent_tiles, whole_mask
from .parts import concatenated, of_tokens
from .softmax import probabilities
from .tiles import goes_by_tiles, row_tiles


def over_latents(a: Arguments) -> Results:
    """`body` of a call without weights."""
    if a.indices is not None:
        return of_queries(over_latents(over_rows(a)), a)
    a = in_numbers(a)
    weights, lse = probabilities(*scores(a), a.scoring, rows_first=True, return_lse=a.return_lse)
    return weighted(weights.to(dtype_of(a)), a), lse


def of_queries(results: Results, a: Arguments) -> Results:
    """What was computed for each query token as a sequence, for the sequences that these are of."""
    out, lse = results
    return out.view(a.query.shape), lse.view(a.query.shape[:3]) if a.return_lse else lse


def in_numbers(a: Arguments) -> Arguments:
    """Replace codes by their numbers. Codes in pages stay: each tile is dequantised when it is read."""
    return dequantised(a) if a.block_table is None else a


def by_tiles(a: Arguments) -> Results:
    """Compute `over_latents`, by tiles of query rows if there are many."""
    context = context_of(a.kv_cache, a.block_table)
    if a.indices is not None or not goes_by_tiles(a.query, context):
        return over_latents(a)
    a = in_numbers(a)
    return concatenated(over_latents(of_tokens(a, *rows)) for rows in row_tiles(a.query, context))


def scores(a: Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The latent and rotary part of the scores, [B, S, N, T], and the mask."""
    rotated = None
    if a.query_rope is not None and a.kr_cache is not None:
        rotated = _products(a.query_rope, a.kr_cache, a.block_table, a.kr_scales)
    return _products(a.query, a.kv_cache, a.block_table, a.kv_scales), rotated, whole_mask(a)


def _products(query: Tensor, cache: Tensor, block_table: Tensor | None, scales: Tensor | None) -> Tensor:
    """[B, S, N, width], and the keys -> [B, S, N, T]."""
    rows = query.flatten(1, 2)
    if block_table is None:
        return wide_product(rows, cache.mT).view(*query.shape[:3], cache.shape[1])
    parts = [wide_product(rows, keys.mT) for keys, _, _ in latent_tiles(cache, block_table, scales, query.dtype)]
    scores = torch.cat(parts, -1) if parts else rows.new_empty(*rows.shape[:2], 0)
    return scores.view(*query.shape[:3], scores.shape[-1])


def weighted(weights: Tensor, a: Arguments) -> Tensor:
    """[B, S, N, T], and the values -> [B, S, N, Hckv]."""
    rows = weights.flatten(1, 2)
    if a.block_table is None:
        return torch.bmm(rows, a.kv_cache).view(a.query.shape)
    out = rows.new_zeros(*rows.shape[:2], a.query.shape[3], dtype=accumulation_dtype(weights.dtype))
    for values, first, last in latent_tiles(a.kv_cache, a.block_table, a.kv_scales, weights.dtype):
        out += torch.bmm(rows[..., first:last], values)
    return out.to(weights.dtype).view(a.query.shape)
