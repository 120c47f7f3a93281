"""FusedInferAttentionScore, written from its documents: latent, expanded and plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu.ge_ops.attention_rules import check


@dataclass(frozen=True)
class Layout:
    """How input_layout says that queries and outputs lie, e.g. "BSND_NBSD"; BSH is BSND with one axis for N and D."""

    query: str
    output: str

    @classmethod
    def of(cls, input_layout: str) -> Layout:
        query, _, output = input_layout.partition("_")
        return cls(query, output or query)

    @property
    def is_ragged(self) -> bool:
        return "T" in self.query


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

    Int8 queries and keys have scales; the weights are not made int8 as on a device, so that results agree to a
    tolerance only. Int8 keys and values of other queries have scales for each column, and may have offsets."""
    kv_heads = num_key_value_heads or num_heads
    check(locals())
    layout = Layout.of(input_layout)
    queries = _queries(query, layout, num_heads, actual_seq_lengths)
    ropes = None if query_rope is None else _queries(query_rope, layout, num_heads, actual_seq_lengths)
    keys, values, key_ropes = (
        None if x is None else _keys(x, layout, kv_heads, block_table, actual_seq_lengths_kv, len(queries))
        for x in (key[0], value[0], key_rope)
    )
    if query.dtype != torch.int8 and key[0].dtype == torch.int8:
        keys, values = _dequantised(keys, "key", rest), _dequantised(values, "value", rest)
    scales = _scales(rest, layout, actual_seq_lengths)
    outputs, sums = [], []
    for row, q in enumerate(queries):
        scores = q.float() @ _shared(keys[row], num_heads).float().mT
        if ropes is not None:
            scores = scores + ropes[row].float() @ _shared(key_ropes[row], num_heads).float().mT
        if scales is not None:
            scores = scores * scales[row]
        hidden = _hidden(row, scores.shape, sparse_mode, atten_mask)
        output, lse = _attend(scores * scale, hidden, _shared(values[row], num_heads), learnable_sink)
        outputs.append(output * rest["value_antiquant_scale"] if scales is not None else output)
        sums.append(lse)
    dtype = query_rope.dtype if query.dtype == torch.int8 else query.dtype
    out = _outputs(outputs, layout, query, actual_seq_lengths).to(dtype)
    return out, _lse(sums, layout) if softmax_lse_flag else torch.zeros(0)


def _attend(scores: Tensor, hidden: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights are rounded to 16 bits before they are divided by their sum. Rows that see no key give zeros."""
    scores = scores.masked_fill(hidden, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    weights = (scores - largest).exp().nan_to_num(0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.float().view(-1, 1, 1) - largest).exp()
    rounded = weights.to(value.dtype) if value.is_floating_point() else weights
    output = (rounded.float() @ value.float() / total).nan_to_num(0)
    return output, torch.where(total > 0, largest + total.log(), torch.inf)


def _queries(query: Tensor, layout: Layout, heads: int, lengths: Tensor | None) -> list[Tensor]:
    """[N, S, D] of each sequence, without padding."""
    rows = _sequences(query, layout.query, heads, lengths)
    if lengths is None or layout.is_ragged:
        return rows
    return [row[:, :length] for row, length in zip(rows, lengths.tolist(), strict=True)]


def _sequences(x: Tensor, axes: str, heads: int, ends: Tensor | None) -> list[Tensor]:
    """[N, S, D] of each sequence; where sequences lie one behind the other, `ends` are sums of lengths."""
    if axes.endswith("H"):
        x, axes = x.unflatten(-1, (heads, -1)), "BSND"
    if "T" not in axes:
        return list(x.permute([axes.index(axis) for axis in "BNSD"]))
    starts = [0, *ends.tolist()[:-1]]
    x = x.permute([axes.index(axis) for axis in "NTD"])
    return [x[:, start:end] for start, end in zip(starts, ends.tolist(), strict=True)]


def _keys(
    x: Tensor, layout: Layout, heads: int, block_table: Tensor | None, lengths: Tensor | None, batch: int
) -> list[Tensor]:
    """[N, L, D] of each sequence, from pages or as the queries lie."""
    if block_table is None:
        rows = _sequences(x, layout.query, heads, lengths)
        if lengths is None or layout.is_ragged:
            return rows
        return [row[:, :length] for row, length in zip(rows, lengths.tolist(), strict=True)]
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


def _scales(rest: dict[str, Any], layout: Layout, lengths: Tensor | None) -> list[Tensor] | None:
    """The scales of int8 scores: [N, S, 1] for each sequence."""
    scale = rest.get("dequant_scale_query")
    if scale is None:
        return None
    axes = layout.query.replace("H", "ND")
    return [row * rest["key_antiquant_scale"] for row in _sequences(scale.unsqueeze(-1), axes, 0, lengths)]


def _hidden(row: int, shape: torch.Size, sparse_mode: int, mask: Tensor | None) -> Tensor:
    """Where a query [N, S] does not see a key [L]."""
    _, queries, keys = shape
    if sparse_mode == 3:
        return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    if mask is None:
        return torch.zeros(queries, keys, dtype=torch.bool)
    mask = mask.reshape(-1, *mask.shape[-2:])
    return mask[row if len(mask) > 1 else 0, :queries, :keys].bool()


def _outputs(rows: list[Tensor], layout: Layout, query: Tensor, lengths: Tensor | None) -> Tensor:
    if layout.is_ragged:
        return torch.cat(rows, 1).permute(["NTD".index(axis) for axis in layout.output])
    steps = query.shape[layout.query.index("S")]
    padded = torch.stack([torch.nn.functional.pad(row, (0, 0, 0, steps - row.shape[1])) for row in rows])
    axes = layout.output.replace("H", "ND")
    out = padded.permute(["BNSD".index(axis) for axis in axes])
    return out.flatten(2) if layout.output.endswith("H") else out


def _lse(rows: list[Tensor], layout: Layout) -> Tensor:
    """float32 [B, N, S, 1], or [T, N, 1]."""
    return torch.cat(rows, 1).transpose(0, 1) if layout.is_ragged else torch.stack(rows)


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
