"""Lowers the base scenario of paged_attention, in either layout or compressed, to FusedInferAttentionScore.

Compressed, each key head of a token has a table and a length of its own: the kernel takes it as a sequence.

ATB's own operators in torch_npu have neither a converter to GE nor a fake kernel, so no graph can contain them."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.called.paged_attention.arguments import (
    BNSD,
    DECODING,
    DEQUANT_FUSION,
    KVHEAD_ROPE,
    PLAIN_SCALE,
    UNCOMPRESSED,
    UNMASKED,
    UNQUANTIZED,
    Arguments,
    read_options,
)
from mla_fx.target import Compiled

from .. import fused_infer_attention_score as kernel
from .. import limits
from ..fused_infer_attention_score import HEAD_PAGES, KERNEL, Lengths
from ..limits import Surface
from .paged_attention_batched import refuse_heads

OPERATOR = "paged_attention"
NO_GRAPH = f"torch.ops.atb._npu_paged_attention has no fake kernel, and {KERNEL}, which has one, takes"

# The value of each enumerator in the base scenario.
BASE = {
    "mask_type": UNMASKED,
    "quant_type": UNQUANTIZED,
    "calc_type": DECODING,
    "scale_type": PLAIN_SCALE,
}


def lower(surface: Surface, a: Arguments) -> Compiled:
    refuse_scenario(a)
    kernel.refuse_chip(surface)
    limits.dtype("query", a.query, KERNEL, limits.HALVES)
    refuse_sizes(a)
    refuse_lengths(a)
    for name in ("key_cache", "value_cache"):
        limits.dense(name, getattr(a, name), KERNEL)
    return plain


def refuse_scenario(a: Arguments) -> None:
    options = read_options(a)
    if options.quant == DEQUANT_FUSION:
        raise NoMatch(f"quant_type is {options.quant!r}, with float32 scales; {NO_GRAPH} scales in the dtype of query")
    chosen = (options.mask, options.quant, options.calc, options.scale)
    for (name, wanted), value in zip(BASE.items(), chosen, strict=True):
        if value != wanted:
            raise NoMatch(f"{name} is {value!r}; {NO_GRAPH} {wanted!r}")
    if options.compress == KVHEAD_ROPE:
        raise NoMatch(f"compress_type is {options.compress!r}; {NO_GRAPH} no numbers that are added to scores")
    if options.nz:
        raise NoMatch(f"the caches are NZ; {NO_GRAPH} plain ones here")
    if a.value_cache is None:
        raise NoMatch(f"value_cache is None; {NO_GRAPH} keys and values in two caches")
    if a.q_scale not in (0.0, 1.0):
        raise NoMatch(f"q_scale is {a.q_scale}; {NO_GRAPH} no scale of the query")


def refuse_lengths(a: Arguments) -> None:
    """Raises NoMatch if a sequence may have no context: it has no query row, but the kernel expects one."""
    given: object = a.context_lens
    if isinstance(given, Tensor):
        raise NoMatch(f"context_lens is a tensor, which may hold 0; {NO_GRAPH} a context for each row of query")
    rows = queries(a).shape[0]
    if not limits.holds(rows == len(a.context_lens)):
        counts = f"query has {rows} rows and context_lens {len(a.context_lens)}"
        raise NoMatch(f"{counts}; {NO_GRAPH} equally many")
    if not all(limits.holds(length > 0) for length in a.context_lens):
        raise NoMatch(f"context_lens is {given}, which may hold 0; {NO_GRAPH} a context for each row of query")


def refuse_sizes(a: Arguments) -> None:
    assert a.value_cache is not None, "a combined cache was refused"
    turn = 1, (2 if has_heads_first(a) else 1)
    refuse_heads(queries(a), a.key_cache.transpose(*turn), a.value_cache.transpose(*turn))
    limits.page_size("key_cache", block_size(a), KERNEL, HEAD_PAGES)


def queries(a: Arguments) -> Tensor:
    """[T,N,D] of sequences with a table each."""
    options = read_options(a)
    return a.query if options.compress == UNCOMPRESSED else a.query.reshape(-1, options.group, a.query.shape[2])


def has_heads_first(a: Arguments) -> bool:
    """Whether pages are [Nkv,BlockSize,D], and not [BlockSize,Nkv,D]."""
    return read_options(a).layout == BNSD


def block_size(a: Arguments) -> int:
    return a.key_cache.shape[2 if has_heads_first(a) else 1]


def plain(surface: Surface, a: Arguments) -> Tensor:
    assert a.value_cache is not None, "a combined cache was refused"
    heads_first = has_heads_first(a)
    keys, values = (cache if heads_first else cache.flatten(2) for cache in (a.key_cache, a.value_cache))
    out, _ = attend_to_pages(
        surface,
        queries(a),
        keys,
        values,
        a.block_tables,
        a.context_lens,
        heads_first=heads_first,
        softmax_scale=a.qk_scale,
        block_size=block_size(a),
        num_key_value_heads=a.key_cache.shape[1 if heads_first else 2],
    )
    return out.reshape(*a.query.shape[:2], -1)


def attend_to_pages(
    surface: Surface,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    context_lens: Lengths,
    *,
    steps: Lengths | None = None,
    query_rope: Tensor | None = None,
    heads_first: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of query [T,N,D] and query_rope [T,N,Dr] to a paged context, [T,N,Dv], and the kernel's sums.

    Pages are [BlockNum,BlockSize,Nkv*D], with `heads_first` [BlockNum,Nkv,BlockSize,D], or in FRACTAL_NZ format
    [BlockNum,Nkv,D/n0,BlockSize,n0]. A sequence has one query row, or as many as `steps` says."""
    is_ragged, token = steps is not None, 2 if heads_first else 1
    queries = [tensor if tensor is None or is_ragged else tensor.unsqueeze(token) for tensor in (query, query_rope)]
    first, rope = (None if tensor is None else tensor.contiguous() for tensor in queries)
    assert first is not None, "query is given"
    out, lse = kernel.attend_and_sum(
        surface,
        first,
        key_pages,
        value_pages,
        query_rope=rope,
        actual_seq_kvlen=context_lens,
        block_table=block_tables.to(torch.int32).contiguous(),
        num_query_heads=query.shape[1],
        **options,
        **({"input_layout": "BNSD" if heads_first else "BSND"} if steps is None else _ragged(steps, query.device)),
    )
    return out if is_ragged else out.squeeze(token), lse


def _ragged(steps: Lengths, device: torch.device) -> dict[str, Any]:
    """Options for the concatenated rows of all sequences, with the cumulative sums of their counts."""
    ends = steps.to(torch.int64).cumsum(0) if isinstance(steps, Tensor) else list(accumulate(steps))
    return {"input_layout": "TND", "actual_seq_qlen": ends, **kernel.causal(device)}
