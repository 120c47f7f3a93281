"""Attention of heads by FusedInferAttentionScore over expanded keys and values: packed rows, any number of tokens.

Queries are [B*S,N,128] and [B*S,N,64], keys and values [B*T,N,128]. Without a rotary part, queries and keys may have
192 columns, and then values may too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.arguments import (
    CHOOSES,
    HEADS,
    HIDING,
    Arguments,
    Results,
    is_chosen_at_run_time,
    refuse_others,
)
from mla_fx.ops.emitted.attention.pages import READS_PAGES
from mla_fx.ops.emitted.attention.softmax import fake_sums
from mla_fx.target import Compiled

from ... import fused_infer_attention_score as kernel
from ... import limits
from ...causal_masks import checked
from ...fused_infer_attention_score import EXPANDED, EXPANDED_UNROTATED, KERNEL, ROPE, Lengths
from ...limits import Surface
from .latents import logarithms

TAKES = (*HEADS, *HIDING, "fill", "sinks", "return_lse")
PACKED = "packed sequences are attended to one by one"
CHOSEN = "no kernel attends to chosen keys with queries that are not absorbed"


def refuse_body(a: Arguments) -> None:
    if a.indices is not None or a.lens is not None:
        return
    if a.block_table is not None and a.max_absorbed_tokens != 0:
        raise NoMatch(READS_PAGES)
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)


def lower(surface: Surface, a: Arguments) -> Compiled:
    kernel.refuse_chip(surface)
    if a.indices is not None:
        raise NoMatch(CHOSEN)
    if a.lens is not None:
        raise NoMatch(PACKED)
    refuse_others(a, KERNEL, *TAKES)
    if surface.mode == "aclgraph":
        raise NoMatch(f"keys are expanded; {KERNEL} takes them in the layout TND, which cannot be captured")
    kernel.refuse_packed(surface, "keys are expanded")
    refuse_sizes(a)
    limits.dtype("query", a.query, KERNEL, (torch.bfloat16,))
    if a.sinks is not None:
        limits.dtype("sinks", a.sinks, KERNEL, (torch.bfloat16,))
        limits.size("with sinks, weight_uv has Dv", a.weights[1].shape[1], KERNEL, (EXPANDED,))
    kernel.refuse_masks(surface, a, a.query.shape[1])
    return attention


def refuse_sizes(a: Arguments) -> None:
    width, values = a.query.shape[3], a.weights[1].shape[1]
    if a.query_rope is None:
        what = "without a rotary part, query has D"
        limits.size(what, width, KERNEL, tuple(EXPANDED_UNROTATED))
        limits.size("weight_uv has Dv", values, KERNEL, EXPANDED_UNROTATED.get(width, (EXPANDED,)))
        return
    limits.size("query has D", width, KERNEL, (EXPANDED,))
    limits.size("weight_uv has Dv", values, KERNEL, (EXPANDED,))
    limits.size("query_rope has Dr", a.query_rope.shape[3], KERNEL, (ROPE,))


def attention(surface: Surface, a: Arguments) -> Results:
    """[B,S,N,128] and [B,S,N]."""
    if not a.return_lse:
        return attend(surface, a)[0], fake_sums(a.query, a.return_lse)
    out, lse = attend(surface, a, return_softmax_lse=True)
    return out, logarithms(a, lse, lengths(a))


def attend(surface: Surface, a: Arguments, **options: Any) -> tuple[Tensor, Tensor]:
    """[B,S,N,128], and the kernel's sums of each row, [B,S,N,1] if it returns them."""
    batch, tokens, heads, _ = a.query.shape
    positions = a.kv_cache.shape[1]
    latent = a.kv_cache.reshape(batch * positions, -1)
    key, value = (up(latent, weight) for weight in a.weights)
    seen = lengths(a)
    queries, keys = ends(a, seen)
    if a.sinks is not None:
        options["learnable_sink"] = a.sinks
    if a.query_rope is not None and a.kr_cache is not None:
        options["query_rope"] = a.query_rope.reshape(batch * tokens, heads, -1)
        options["key_rope"] = a.kr_cache.reshape(batch * positions, 1, -1).expand(-1, heads, -1).contiguous()
    out, lse = kernel.attend_and_sum(
        surface,
        a.query.reshape(batch * tokens, heads, -1),
        key,
        value,
        actual_seq_qlen=queries,
        actual_seq_kvlen=keys,
        num_query_heads=heads,
        num_key_value_heads=heads,
        softmax_scale=a.scale,
        input_layout="TND",
        **options,
        **kernel.rows(tokens, latent.device),
    )
    sums = lse.view(batch, tokens, heads, 1) if "return_softmax_lse" in options else lse
    return checked(out.view(batch, tokens, heads, -1), a.mask, seen), sums


def lengths(a: Arguments) -> Tensor | None:
    """What kernel.lengths says, but for a mask no fewer than there are queries, which the kernel wants."""
    seen = kernel.lengths(a)
    return seen if seen is None or a.mask is None else seen.clamp(min=a.query.shape[1])


def ends(a: Arguments, seen: Tensor | None) -> tuple[Lengths, Lengths]:
    """The ends of queries and keys of all sequences, which lie one behind the other."""
    batch, tokens = a.query.shape[:2]
    positions, device = a.kv_cache.shape[1], a.kv_cache.device
    if seen is not None:
        return kernel.ends_of_parts(batch, tokens, seen, positions, device)
    if a.is_causal and not limits.known_equal(tokens, positions):
        return kernel.ends_of_parts(batch, tokens, tokens, positions, device)
    return kernel.ends(batch, tokens, device), kernel.ends(batch, positions, device)


def up(latent: Tensor, weight: Tensor) -> Tensor:
    """[B*T,Hckv], [N,D,Hckv] -> [B*T,N,D]."""
    heads, width, rank = weight.shape
    return (latent @ weight.reshape(heads * width, rank).t().contiguous()).view(-1, heads, width)
