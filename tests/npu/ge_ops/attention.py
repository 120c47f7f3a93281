"""FusedInferAttentionScore, written from its documents, in the layouts that the package uses: BSND and BNSD over pages,
and TND."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu.ge_ops.attention_rules import check


def FusedInferAttentionScore(
    query: Tensor,
    key: Sequence[Tensor],
    value: Sequence[Tensor],
    *,
    num_heads: int,
    num_key_value_heads: int,
    input_layout: str,
    scale: float,
    softmax_lse_flag: bool,
    actual_seq_lengths: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    sparse_mode: int = 0,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """softmax((query . key + query_rope . key_rope) * scale) @ value, beside learnable_sink, a score without a value.

    Int8 keys and values have scales for each column, and may have offsets."""
    kv_heads = num_key_value_heads or num_heads
    check(locals())
    queries = _sequences(query, input_layout, actual_seq_lengths)
    ropes = None if query_rope is None else _sequences(query_rope, input_layout, actual_seq_lengths)
    keys, values, key_ropes = (
        None if x is None else _keys(x, input_layout, kv_heads, block_table, actual_seq_lengths_kv)
        for x in (key[0], value[0], key_rope)
    )
    if key[0].dtype == torch.int8:
        keys, values = _dequantised(keys, "key", rest), _dequantised(values, "value", rest)
    outputs, sums = [], []
    for row, q in enumerate(queries):
        scores = q.float() @ _shared(keys[row], num_heads).float().mT
        if ropes is not None:
            scores = scores + ropes[row].float() @ _shared(key_ropes[row], num_heads).float().mT
        output, lse = _attend(
            scores * scale, _hidden(scores, sparse_mode), _shared(values[row], num_heads), learnable_sink
        )
        outputs.append(output)
        sums.append(lse)
    is_ragged = input_layout == "TND"
    out = torch.cat(outputs, 1).transpose(0, 1) if is_ragged else torch.stack(outputs)
    out = out.transpose(1, 2) if input_layout == "BSND" else out
    if not softmax_lse_flag:
        return out.to(query.dtype), torch.zeros(0)
    return out.to(query.dtype), torch.cat(sums, 1).transpose(0, 1) if is_ragged else torch.stack(sums)


def _attend(scores: Tensor, hidden: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights are rounded to 16 bits before they are divided by their sum. Rows that see no key give zeros."""
    scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    weights = (scores - largest).exp().nan_to_num(0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.float().view(-1, 1, 1) - largest).exp()
    output = (weights.to(value.dtype).float() @ value.float() / total).nan_to_num(0)
    return output, torch.where(total > 0, largest + total.log(), torch.inf)


def _sequences(x: Tensor, axes: str, ends: Tensor | None) -> list[Tensor]:
    """[N, S, D] of each sequence; where they lie one behind the other, `ends` are sums of lengths."""
    if axes != "TND":
        return list(x if axes == "BNSD" else x.transpose(1, 2))
    assert ends is not None, "others are refused"
    return [part.transpose(0, 1) for part in x.tensor_split(ends[:-1])]


def _keys(x: Tensor, layout: str, heads: int, block_table: Tensor | None, lengths: Tensor) -> list[Tensor]:
    """[N, L, D] of each sequence, from pages or one behind the other."""
    if block_table is None:
        return _sequences(x, layout, lengths)
    pages = _pages(x, heads)
    size = pages.shape[2]
    tables = zip(block_table.tolist(), lengths.tolist(), strict=True)
    return [pages[blocks[: -(-length // size)]].transpose(0, 1).flatten(1, 2)[:, :length] for blocks, length in tables]


def _pages(cache: Tensor, heads: int) -> Tensor:
    """[blocks, N, BS, D] of [blocks, BS, N*D], [blocks, N, BS, D] or, in FRACTAL_NZ, [blocks, N, D/d0, BS, d0]."""
    if cache.ndim == 3:
        return cache.unflatten(-1, (heads, -1)).transpose(1, 2)
    return cache if cache.ndim == 4 else cache.transpose(2, 3).flatten(3)


def _shared(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[0], 0)


def _dequantised(rows: list[Tensor], name: str, rest: dict[str, Any]) -> list[Tensor]:
    """(codes + offset) * scale for each column of each head, in float32: a device rounds no key and no value."""
    scale, offset = rest[f"{name}_antiquant_scale"], rest.get(f"{name}_antiquant_offset")
    heads, _, width = rows[0].shape
    scale, offset = (0 if x is None else x.float().reshape(heads, 1, width) for x in (scale, offset))
    return [(row.float() + offset) * scale for row in rows]


def _hidden(scores: Tensor, sparse_mode: int) -> Tensor:
    """Where a query [N, S] does not see a key [L]."""
    _, queries, keys = scores.shape
    hidden = torch.ones(queries, keys, dtype=torch.bool)
    return hidden.triu(keys - queries + 1) if sparse_mode == 3 else ~hidden


def AttentionUpdate(lse: list[Tensor], go: list[Tensor], update_type: int, sp: int) -> tuple[Tensor, Tensor]:
    """Parts [R, D] with logarithms [R] in float32. Rows that no part sees are NaN, and so is zero times NaN."""
    if update_type != 1 or sp != len(lse) or len(go) != sp or not 1 <= sp <= 16:
        raise ValueError(f"update_type is {update_type} and sp {sp}, with {len(lse)} parts")
    if any(part.dtype != torch.float32 or part.dim() != 1 for part in lse) or go[0].shape[1] % 8:
        raise ValueError("lse must be [R] in float32, and go [R, D] with D a multiple of 8")
    largest = torch.stack(lse).amax(0)
    whole = largest + sum((part - largest).exp() for part in lse).log()
    out = sum(part.float() * (own - whole).exp().unsqueeze(-1) for part, own in zip(go, lse, strict=True))
    return out.to(go[0].dtype), whole
