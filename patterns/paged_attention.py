"""Attention over keys and values per head in pages, gathered through a block table, as one operator that reads the
pages itself. Serving engines store contexts without latents like this.

    score[b,n,s,t] = scale * (query . key_cache[block_table][b,t,h]) + mask,  n = h * group + g
    out[b,n,s,v]   = sum_t softmax(score)[t] value_cache[block_table][b,t,h,v]

Spellings: blocks looked up (`cache[block_table]`, index_select, embedding); slots computed from a table, or given per
token, which are blocks of one row; heads repeated, expanded, or grouped by a view. The rows in a table may be any rows:
the operator reads the same ones.

Masks that provably hide exactly the keys after a position or a length become `context_lens`; all others stay masks. The
operator sums scores in float32 at least and rounds probabilities to the dtype in which they are multiplied by the
values, like the program. If that rounds anything more coarsely, the engine refuses. A program may compute in a wider
dtype than it stores, as PyTorch's own attention does in plain operators: a target whose kernel does not take that gets
a query of the caches' dtype, if it is exact in it.

Axes: b batch, s query tokens, h key heads, g query heads of each, t context tokens, d key columns, v value columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.functional import scaled_dot_product_attention

from mla_fx.cases import HE, B, S, T
from mla_fx.ops.common.check import FLOATS
from mla_fx.readings.attention import anchors, attention
from mla_fx.readings.axes import Axis
from mla_fx.readings.element import is_coarser
from mla_fx.readings.paged import GATHERS
from mla_fx.readings.sizes import product
from mla_fx.rewriting.masks import check_is_causal, known_causal, lengths, mask_operands
from mla_fx.rewriting.operands import block_table
from mla_fx.rule import (
    Attention,
    AttentionPattern,
    Axes,
    Call,
    Case,
    Contraction,
    Expression,
    Match,
    NearestMiss,
    NoMatch,
    Paged,
    Plan,
    Rule,
    ViewOf,
    axes,
    contract,
    gathered,
    ordered,
    replaced,
    result,
    tensor,
    times,
    var,
)

KEYS = gathered(var("key_cache"), var("block_table"), name="keys")
VALUES = gathered(var("value_cache"), var("block_table"), name="values")
OVER_PAGES = AttentionPattern(scores=(contract(var("query"), KEYS, name="scores"),), value=VALUES)


HEADS, KV_HEADS, WIDTH, COLUMNS, BLOCK = 4, 2, 8, 6, 4


class _Serving(nn.Module):
    """A layer of a serving engine: rows are written by slot, and contexts gathered through a table."""

    key_cache: Tensor
    value_cache: Tensor
    table: Tensor
    starts: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        widths = HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * COLUMNS
        self.qkv = nn.ParameterList(torch.randn(HE, width, generator=generator) * HE**-0.5 for width in widths)
        blocks = 2 * B * T // BLOCK
        for name, width in (("key_cache", WIDTH), ("value_cache", COLUMNS)):
            self.register_buffer(name, torch.randn(blocks, BLOCK, KV_HEADS, width, generator=generator))
        self.register_buffer("table", torch.randperm(blocks, generator=generator)[: B * T // BLOCK].view(B, -1))
        self.register_buffer("starts", torch.tensor([T - S, 5]))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        heads = HEADS, KV_HEADS, KV_HEADS
        query, *rows = ((x @ weight).unflatten(-1, (n, -1)) for weight, n in zip(self.qkv, heads, strict=True))
        positions = self.starts[:, None] + torch.arange(S)
        slots = self.table.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
        caches = self.key_cache, self.value_cache
        for cache, row in zip(caches, rows, strict=True):
            cache.flatten(0, 1)[slots] = row.to(cache.dtype)
        key, value = (self.context(cache, table) for cache, table in zip(caches, self.tables(), strict=True))
        seen = self.seen(torch.arange(T), positions.unsqueeze(-1))
        return self.attend(query, key, value, seen.unsqueeze(1))

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        """[B, T, Hkv, columns]."""
        return cache[table].view(B, T, KV_HEADS, -1)

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        """[B, S, T]."""
        return keys <= positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """[B, S, H, columns]."""
        key, value = (rows.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2) for rows in (key, value))
        return self.weigh(query.transpose(1, 2) @ key.mT * WIDTH**-0.5, value, seen).transpose(1, 2)

    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value


class _Fused(_Serving):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)


class _Grouped(_Serving):
    """Einsum over the query heads of each key head."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("bshgd,bthd->bhgst", query.reshape(B, S, KV_HEADS, -1, WIDTH), key)
        weights = (scores + torch.where(seen, 0.0, -torch.inf).unsqueeze(2)).softmax(-1)
        return torch.einsum("bhgst,bthd->bshgd", weights, value).flatten(2, 3)


class _BySlots(_Serving):
    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache.flatten(0, 1)[(table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(1)]


class _ByLength(_Serving):
    """The number of keys of each sequence; the last token sees all of them."""

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        lengths = positions[:, -1:] + 1
        return keys < lengths - S + torch.arange(1, S + 1).unsqueeze(-1)


class _Window(_Serving):
    """A mask that no length describes stays a mask."""

    def seen(self, keys: Tensor, positions: Tensor) -> Tensor:
        return (keys <= positions) & (keys > positions - 4)


class _TwoTables(_Serving):
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table.flip(1)


class _RowsFirst(_Serving):
    """A context reads all first rows of its blocks, then all second rows."""

    def context(self, cache: Tensor, table: Tensor) -> Tensor:
        return cache[table].transpose(1, 2).reshape(B, T, KV_HEADS, -1)


class _WeighedKeys(_Serving):
    """Keys are weighted after they were gathered."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return super().attend(query, key * torch.linspace(0.5, 1.5, T).view(T, 1, 1), value, seen)


class _Sink(_Serving):
    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = torch.cat((scores.masked_fill(~seen, -torch.inf), torch.ones(B, HEADS, S, 1)), -1)
        return scores.softmax(-1)[..., :-1] @ value


class _OneLatent(_Serving):
    """All heads share one key, whose first columns are the value."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        latent = key[:, :, :1].transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ latent.mT, latent[..., :COLUMNS], seen).transpose(1, 2)


class _HeadsOfValues(_Serving):
    """Keys and values are repeated in another order."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        key = key.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
        value = value.unsqueeze(2).expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(2, 3).transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ key.mT, value, seen).transpose(1, 2)


class _OneHeadOfValues(_Serving):
    """Each query head has a key head; all share one head of values."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        key = key.repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
        return self.weigh(query.transpose(1, 2) @ key.mT, value[:, :, :1].transpose(1, 2), seen).transpose(1, 2)


class _WiderKeys(_Serving):
    """Keys are stored and read in float32; values are bfloat16, and so are the probabilities that multiply them."""

    def __init__(self) -> None:
        super().__init__()
        self.value_cache = self.value_cache.bfloat16()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return super().attend(query.bfloat16().float(), key, value, seen).float()

    def weigh(self, scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).bfloat16() @ value


ONE = {"paged_attention": 1}


class PagedAttention(Rule):
    stage = "attention"
    after = ("mla_attention",)  # which also reads one latent for all heads in blocks
    yields_to_target = True
    accepts = (
        Case("heads repeated", _Serving, ONE),
        Case("scaled_dot_product_attention", _Fused, ONE),
        Case("grouped by einsum", _Grouped, ONE),
        Case("slots", _BySlots, ONE),
        Case("lengths", _ByLength, ONE),
        Case("a window", _Window, ONE),
        Case("one latent", _OneLatent, {"latent_attention": 1}),
    )
    rejects = (
        Case("two tables", _TwoTables, because="block_table is not one tensor"),
        Case("first rows first", _RowsFirst, because="the rows of a block are not consecutive"),
        Case("a weight per key", _WeighedKeys, because="expected gathered rows, found mul"),
        Case("attention sink", _Sink, because="paged_attention has no operand for an attention sink"),
        Case("heads of values in another order", _HeadsOfValues, because="do not have the same heads"),
        Case("one head of values", _OneHeadOfValues, because="do not have the same heads"),
        Case("keys in a wider type", _WiderKeys, because="the cache is in torch.float32"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return anchors(graph)

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        """No matches and no misses if no values are gathered; other rules report attention that is not read."""
        try:
            found = attention(anchor)
        except NoMatch:
            return
        if found.value.origin.target not in GATHERS:
            return
        yield from OVER_PAGES.bindings(found, found.scores, nearest)

    def rewrite(self, match: Match) -> Plan:
        """`page` are the axes of the context that select blocks, `row` those within a block."""
        found, scores = match.reading(Attention, "attention"), match.reading(Contraction, "scores")
        keys, values = match.reading(Paged, "keys"), match.reading(Paged, "values")
        if found.sink is not None:
            raise NoMatch("paged_attention has no operand for an attention sink", found.node)
        t, d = axes(found.keys, "the context", found.node), scores.axes
        (page, row), _ = (paged.blocks_and_rows(t) for paged in (keys, values))
        outer = tuple(axis for part in found.index for axis in axes(part, "the attention's output", found.node))
        b = ordered(keys.table.axes - {*t}, outer)
        own = {*keys.block.axes, *values.block.axes, *row}
        h = ordered(keys.pages.axes - own - {*d}, outer)
        v = ordered(values.pages.axes - own - {*h}, outer)
        if not set(h) <= values.pages.axes or not {*h, *v} <= set(outer):
            raise NoMatch("keys and values do not have the same heads", values.node)
        rows = match["query"].axes - {*b, *h, *d}
        if not rows.isdisjoint(v):
            raise NoMatch("keys and values do not have the same heads", values.node)
        tokens = _tokens(found, rows, h)
        s, g = (ordered(part, outer) for part in (tokens, rows - tokens))
        n, dtype = (*h, *g), found.node.meta["val"].dtype
        table = block_table(b, page, keys, values)

        def plan(dtype: torch.dtype, instead: Plan | None = None) -> Plan:
            query = tensor(match["query"], (b, s, n, d), dtype=dtype, expand=True)
            caches = [
                _pages(paged, (axes(paged.block, "the blocks", paged.node), row, h, columns), dtype)
                for paged, columns in ((keys, d), (values, v))
            ]
            mask, lens, fill = _masks(found, (b, n, s, (*page, *row)), dtype)
            options = {"scale": scores.factor} | ({} if fill is None else {"fill": fill})
            operator = torch.ops.mla_fx.paged_attention.batched
            out = times(Call(operator, query, *caches, table, lens, mask, **options), found.value_factor)
            new = replaced(found.node, found.index, result(out, (b, s, n, v)), padding=found.padding)
            return Plan(new, instead=instead)

        stored = keys.pages.dtype
        is_narrow = stored == values.pages.dtype and is_coarser(stored, dtype) and match["query"].is_exact_in(stored)
        return plan(dtype, plan(stored) if is_narrow else None)


def _tokens(found: Attention, rows: frozenset[Axis], h: Axes) -> frozenset[Axis]:
    """The axes of tokens among those that only the query has: those of a mask, and of one that is the same for all
    heads if there is one. Without a mask they count as heads, which see the same keys."""
    masks = [found.causal.rows.axes] if found.causal is not None else [mask.element.axes for mask in found.masks]
    of_rows = [axes for axes in masks if not axes.isdisjoint(rows)]
    return rows & min(of_rows, key=lambda axes: (not axes.isdisjoint(h), len(axes & rows)), default=frozenset())


def _masks(
    found: Attention, dims: tuple[Axes, Axes, Axes, Axes], dtype: torch.dtype
) -> tuple[Expression | None, Expression | None, float | None]:
    """A mask or lengths, and the number that fills scores."""
    b, _, s, _ = dims
    if found.causal is None:
        return mask_operands(found, known_causal(found, b, s, dtype), dims)
    check_is_causal(found, s)
    return None, lengths(product(axis.size for axis in s), found.node.meta["val"].device), None


def _pages(found: Paged, dims: tuple[Axes, ...], dtype: torch.dtype) -> Expression:
    """A view of a cache; copying it would cost more than the gathered rows."""
    stored = found.pages.dtype
    if stored not in FLOATS or is_coarser(dtype, stored):
        raise NoMatch(f"the cache is in {stored}; paged_attention computes in {dtype} here", found.node)
    if found.table.origin.meta["val"].device != found.node.meta["val"].device:
        raise NoMatch("the block table is on another device than the cache", found.table.origin)
    because = "reading the cache as pages of rows of heads would copy it"
    return ViewOf(tensor(found.pages, dims, read_by=found.node), found.pages.origin, because)
