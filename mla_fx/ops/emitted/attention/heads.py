"""Attention of heads, whose keys and values are expanded from the latents, or whose queries are absorbed instead."""

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.ops.common.math import wide_product

from .arguments import Arguments, Attend, Results
from .latents import over_latents
from .pages import unpaged, whole_mask, without_codes
from .parts import concatenated, of_tokens
from .softmax import as_mask, fake_sums, probabilities
from .tiles import Form, at_once, attend, mask_of_rows, parts, row_tiles, rows_first, seen_keys

EXPONENT = 0x7F800000  # the bits of a float32 that make a power of two
ROWS = 256  # query tokens that choose keys and are absorbed at a time


def by_rows(a: Arguments, attend: Attend) -> Results:
    """`absorbed` by tiles of query rows: absorbed queries are several times as large as plain ones."""
    tiles = parts(max(1, a.query.shape[1]), ROWS)  # at least one: none of no rows
    return concatenated(absorbed(of_tokens(a, *rows), attend) for rows in tiles)


def absorbed(a: Arguments, attend: Attend = over_latents) -> Results:
    """The latent form: cost grows with S * T * Hckv, and nothing is expanded."""
    latent, lse = attend(in_latent_space(a))
    return expand_output(latent, a.weights[1]), lse


def in_latent_space(a: Arguments) -> Arguments:
    """The call without weights, whose result is still to be expanded."""
    query = absorbed_query(a.query, a.weights[0])
    a = a if query.dtype == a.query.dtype else without_codes(a)  # their numbers have the dtype of the query
    return replace(a, query=query, weight_uk=None, weight_uv=None, max_absorbed_tokens=0)


def absorbed_query(query: Tensor, weight_uk: Tensor) -> Tensor:
    """The absorbed query [B, S, N, Hckv]; in float32 for float16, whose range it may leave.

    For float16, each row is divided by a power of two, so that no sum exceeds the largest weight. That rounds only
    elements below 2**-17 of the largest. The result is multiplied by it again."""
    if query.dtype != torch.float16:
        return absorb_query(query, weight_uk)
    most = query.abs().amax(-1, keepdim=True).float() * (2 * query.shape[-1])
    power = (most.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=1)  # between most / 2 and most
    return absorb_query((query / power).to(query.dtype), weight_uk) * power


def absorb_query(q_nope: Tensor, weight_uk: Tensor) -> Tensor:
    """[B,S,N,D], [N,D,Hckv] -> [B,S,N,Hckv]."""
    return _per_head(q_nope, weight_uk)


def expand_output(out: Tensor, weight_uv: Tensor) -> Tensor:
    """[B,S,N,Hckv], [N,Dv,Hckv] -> [B,S,N,Dv]."""
    return _per_head(out, weight_uv.permute(0, 2, 1)).contiguous()


def _per_head(value: Tensor, weight: Tensor) -> Tensor:
    """[B,S,N,I], [N,I,O] -> [B,S,N,O]."""
    batch, tokens, heads, width = value.shape
    by_head = value.permute(2, 0, 1, 3).reshape(heads, batch * tokens, width)
    return torch.bmm(by_head, weight).reshape(heads, batch, tokens, weight.shape[2]).permute(1, 2, 0, 3)


def expanded(a: Arguments) -> Results:
    """The per-head form: keys and values are expanded once; then cost grows with S * T * (D + Dv)."""
    scores, value = operands(a)
    return weighted(*scores, value, a)


def weighted(latent: Tensor, rotated: Tensor | None, mask: Tensor | None, value: Tensor, a: Arguments) -> Results:
    """The results for parts of the scores [B, N, S, T] and values [B, N, T, Dv]."""
    weights, lse = probabilities(latent, rotated, mask, a.scoring, return_lse=a.return_lse)
    return rows_first(weights.to(value.dtype) @ value), rows_first(lse) if a.return_lse else lse


def in_tiles(a: Arguments) -> Results:
    """`expanded` by tiles of query rows."""
    a = unpaged(a)
    query, key, value = joined(a, None)
    mask = whole_mask(a)
    return concatenated(
        weighted(wide_product(query[:, :, first:last], key.mT), None, mask_of_rows(mask, first, last), value, a)
        for first, last in row_tiles(a.query, key.shape[2])
    )


def operands(a: Arguments) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The latent and rotary part of the scores [B, N, S, T] with the mask, and the values [B, N, T, Dv]."""
    a = unpaged(a)
    both = torch.einsum("btr,ndr->bntd", a.kv_cache, torch.cat(a.weights, 1))
    k_nope, value = torch.split(both, [weight.shape[1] for weight in a.weights], -1)
    latent = wide_product(a.query.transpose(1, 2), k_nope.mT)
    rotated = None
    if a.query_rope is not None and a.kr_cache is not None:
        # All heads share kr_cache: one product over N*S rows; broadcasting would copy it for every head.
        rotated = wide_product(a.query_rope.transpose(1, 2).flatten(1, 2), a.kr_cache.mT).view(latent.shape)
    return (latent, rotated, whole_mask(a)), value


def tiled(a: Arguments, choose: Form = at_once) -> Results:
    """`expanded` without logarithms in memory that does not grow with S * T: the nope and rotary parts of keys are
    joined."""
    a = unpaged(a)
    mask = as_mask(a.mask, a.context_lens, False, a.query, a.kv_cache.shape[1])
    out = attend(*joined(a, seen_keys(mask)), mask, a.scoring, a.is_causal, choose)
    return rows_first(out), fake_sums(a.query, return_lse=False)


def joined(a: Arguments, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, N, S, D + Dr], keys [B, N, T, D + Dr] and values [B, N, T, Dv]; keys that are not seen are zeros."""
    latents, rotary, (weight_uk, weight_uv) = a.kv_cache, a.kr_cache, a.weights
    if seen is not None:
        latents, rotary = latents.masked_fill(~seen, 0), None if rotary is None else rotary.masked_fill(~seen, 0)
    query, key = a.query, torch.einsum("btr,ndr->btnd", latents, weight_uk)
    if a.query_rope is not None and rotary is not None:
        query = torch.cat((query, a.query_rope), -1)
        key = torch.cat((key, rotary.unsqueeze(2).expand(-1, -1, key.shape[2], -1)), -1)
    value = torch.einsum("btr,nvr->btnv", a.kv_cache, weight_uv)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
