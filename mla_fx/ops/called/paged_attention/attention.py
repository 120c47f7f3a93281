"""The computation of paged_attention, for all sequences at once, tile by tile of key positions.

E entries (running sequences or, with compression, the key heads of each), K key heads of an entry, S query rows of an
entry, G query heads of a key head, M = S*G, W key positions of a tile, D and Dv head sizes of keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fx.ops.common.cast import i8_half_rint
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.paged import (
    TILE,
    Product,
    Tile,
    gather_rows,
    host_lengths,
    int8_product,
    online_softmax,
    rounded_product,
    row_index,
)

from .arguments import BNSD, DEQUANT_FUSION, Arguments, Options
from .masks import read_mask


@dataclass(frozen=True)
class Entries:
    """The entries, on the CPU: [E] each, or [E, S] for their query rows; some entries have fewer rows than S."""

    table_row: Tensor  # in context_lens and block_tables
    sequence: Tensor
    key_head: Tensor  # with compression; otherwise 0
    context: Tensor
    query_row: Tensor  # in query; 0 where there is none
    exists: Tensor  # whether this query row exists
    query_position: Tensor  # among the keys; the last key belongs to the last query row


def query_counts(contexts: Tensor, q_seq_lens: Tensor | None, o: Options) -> Tensor:
    """The number of query rows of each sequence, [B]; 0 without a context."""
    runs = contexts.view(-1, o.tables_per_sequence).amax(1) > 0
    counts = torch.ones_like(runs, dtype=torch.int64) if q_seq_lens is None else host_lengths(q_seq_lens)
    return torch.where(runs, counts, 0)


def find_entries(a: Arguments, o: Options) -> Entries:
    contexts = host_lengths(a.context_lens)
    counts = query_counts(contexts, a.q_seq_lens, o)
    rows, exists = row_index(counts)
    table_row = contexts.nonzero().squeeze(1)
    sequence, key_head = table_row // o.tables_per_sequence, table_row % o.tables_per_sequence
    context, row, exists = contexts[table_row], rows[sequence], exists[sequence]
    step = torch.where(exists, torch.arange(row.shape[1]), 0)
    position = (context - counts[sequence]).unsqueeze(1) + step
    return Entries(table_row, sequence, key_head, context, row, exists, position)


def value_size(a: Arguments, o: Options) -> int:
    """Dv."""
    if a.value_cache is None:
        return a.mla_v_head_size
    return a.query.shape[2] if o.nz else a.value_cache.shape[3]


def attend_(attn_out: Tensor, a: Arguments, o: Options) -> None:
    """Write the attention of every row of query that belongs to a sequence with a context."""
    entries = find_entries(a, o)
    if entries.table_row.numel() == 0:
        return
    exists = entries.exists.to(attn_out.device)
    result = attention(a, o, entries)[exists].to(attn_out.dtype)
    index: list[Tensor | None] = [
        part.expand_as(entries.query_row).to(attn_out.device)[exists] for part in query_index(entries, o)
    ]
    by_key_head(attn_out, o).index_put_(index, result.squeeze(1) if o.compressed else result)


def attention(a: Arguments, o: Options, entries: Entries) -> Tensor:
    """[E, S, K, G, Dv], not yet rounded."""
    query = grouped_query(a, o, entries)
    count, key_heads, steps, group, _ = query.shape
    like = query.new_empty(count, key_heads, steps * group, value_size(a, o))
    out, _ = online_softmax(tiles(a, o, entries, query), weighted_values(a, o), like)
    return torch.unflatten(out, 2, (steps, group)).transpose(1, 2)


def tiles(a: Arguments, o: Options, entries: Entries, query: Tensor) -> Iterator[Tile]:
    """Yield scores [E, K, M, W] and values [E, K, W, Dv], tile by tile; `query` is [E, K, S, G, D]."""
    read = Pages(a, o, entries, query.dtype)
    finish = Scores(a, o, entries, query.dtype)
    contexts = entries.context.to(query.device)
    shortest, longest = int(entries.context.min()), int(entries.context.max())
    for start in range(0, longest, TILE):
        positions = torch.arange(start, min(start + TILE, longest), device=query.device)
        keys, values = read.at(positions)
        scores = torch.unflatten(query.flatten(2, 3) @ keys.mT, 2, query.shape[2:4])
        scores = finish.at(positions, scores, read.tables)
        if start + TILE > shortest:
            hidden = positions >= contexts.unsqueeze(1)
            scores = scores.masked_fill(hidden[:, None, None, None], -torch.inf)
            values = values.masked_fill(hidden[:, None, :, None], 0)
        yield scores.flatten(2, 3), values


def grouped_query(a: Arguments, o: Options, entries: Entries) -> Tensor:
    """The query rows [E, K, S, G, D] in the accumulation dtype; a missing row is another row, whose result is not
    read."""
    query = a.query if a.q_scale in (0.0, 1.0) else a.query * a.q_scale
    index = tuple(part.to(query.device) for part in query_index(entries, o))
    rows = by_key_head(query, o)[index]
    if o.compressed:
        rows = rows.unsqueeze(2)
    return rows.transpose(1, 2).to(accumulation_dtype(query.dtype))


def query_index(entries: Entries, o: Options) -> tuple[Tensor, ...]:
    """The places of an entry's rows in [T, Hkv, G, D]: all heads of a token, or those of one key head."""
    return (entries.query_row, entries.key_head.unsqueeze(1)) if o.compressed else (entries.query_row,)


def by_key_head(rows: Tensor, o: Options) -> Tensor:
    """[T, H, D] as [T, Hkv, G, D]."""
    return torch.unflatten(rows, 1, (o.kv_heads, o.group))


class Pages:
    """Reads keys and values from the caches, in the accumulation dtype."""

    def __init__(self, a: Arguments, o: Options, entries: Entries, dtype: torch.dtype) -> None:
        self.a, self.o, self.dtype = a, o, dtype
        self.keys = by_position(a.key_cache, o)
        self.values = None if a.value_cache is None else by_position(a.value_cache, o)
        self.key_head = entries.key_head.to(a.query.device)
        self.tables = a.block_tables[entries.table_row.to(a.block_tables.device)]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[E, K, W, D] and [E, K, W, Dv] at `positions` [W]."""
        keys = self.rows(self.keys, positions, self.a.k_descale, self.a.k_offset)
        if self.values is None:
            return keys, keys[..., : self.a.mla_v_head_size]
        return keys, self.rows(self.values, positions, self.a.v_descale, self.a.v_offset)

    def rows(self, cache: Tensor, positions: Tensor, descale: Tensor | None, offset: Tensor | None) -> Tensor:
        rows = gather_rows(cache, self.tables, positions)
        if self.o.nz:
            rows = rows.flatten(-2)
        if descale is not None and self.o.quant == DEQUANT_FUSION:
            rows = self.dequantized(rows, descale, offset)
        return rows.transpose(1, 2).to(self.dtype, memory_format=torch.contiguous_format)

    def dequantized(self, rows: Tensor, descale: Tensor, offset: Tensor | None) -> Tensor:
        """`(rows + offset) * descale`, rounded to the dtype of query; `rows` [E, W, K, D]."""
        rows = rows.float()
        if offset is not None:
            rows = rows + self.by_column(offset).float()
        return (rows * self.by_column(as_float32(descale))).to(self.a.query.dtype)

    def by_column(self, columns: Tensor) -> Tensor:
        """[Hkv*D] as [K, D] or, with compression, the row of each entry's key head, [E, 1, 1, D]."""
        columns = torch.unflatten(columns, 0, (self.o.kv_heads, -1))
        return columns[self.key_head][:, None, None] if self.o.compressed else columns


def by_position(cache: Tensor, o: Options) -> Tensor:
    """A view [BlockNum, BlockSize, K, D] of a cache, [.., D/16, 16] of one in NZ format."""
    if o.nz:
        return torch.unflatten(cache, 1, (o.kv_heads, -1)).permute(0, 3, 1, 2, 4)
    return cache.transpose(1, 2) if o.layout == BNSD else cache


class Scores:
    """How the products of query and keys become scores."""

    def __init__(self, a: Arguments, o: Options, entries: Entries, dtype: torch.dtype) -> None:
        device = a.query.device
        sequence, key_head = entries.sequence.to(device), entries.key_head.to(device)
        self.dtype = dtype
        self.razor_offset = a.razor_offset
        self.descale: Tensor | None = None
        if a.k_descale is not None and o.fully_quantized:
            self.descale = per_head(a.k_descale, o).unsqueeze(1)
        self.scale: float | Tensor = a.qk_scale
        if a.log_n is not None:
            scale = torch.full_like(a.log_n, a.qk_scale) * a.log_n
            self.scale = scale[sequence].to(dtype).view(-1, 1, 1, 1, 1)
        positions, rows = entries.query_position.to(device), entries.query_row.to(device)
        self.mask = read_mask(a, o, sequence, key_head * o.group, positions, rows)

    def at(self, positions: Tensor, products: Tensor, tables: Tensor) -> Tensor:
        """The scores [E, K, S, G, W] of `positions` [W]."""
        scores = products if self.descale is None else products * self.descale
        if self.razor_offset is not None:
            scores = scores + gather_rows(self.razor_offset, tables, positions)[:, None, None, None]
        scores = scores * self.scale
        return scores if self.mask is None else scores + self.mask.at(positions).to(self.dtype)


def per_head(scale: Tensor, o: Options) -> Tensor:
    """[H] as float32 [K, G, 1]."""
    return as_float32(scale).view(o.kv_heads, o.group, 1)


def as_float32(scale: Tensor) -> Tensor:
    """int64 scales hold the bits of a float32 in their low half."""
    return scale if scale.is_floating_point() else scale.to(torch.int32).view(torch.float32)


def weighted_values(a: Arguments, o: Options) -> Product:
    """How the weights of a tile are rounded and multiplied by its values."""
    if a.v_descale is None or not o.fully_quantized:
        return rounded_product(a.query.dtype)
    descale = per_head(a.v_descale, o)
    return int8_product(descale) if a.p_scale is None else offline_product(per_head(a.p_scale, o), descale)


def offline_product(scale: Tensor, descale: Tensor) -> Product:
    """The weights become int8 by a factor known beforehand, [K, M, 1]."""

    def product(weights: Tensor, tile_max: Tensor, running_max: Tensor, values: Tensor) -> Tensor:
        return (i8_half_rint(weights * scale).to(values.dtype) @ values) * descale

    return product
