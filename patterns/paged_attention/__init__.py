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

Caches may hold codes in int8, `(codes + offset) * scale`: scale and offset are the same for all tokens, and for the
query heads of a key head. A scale of the query or of the result stays where it is.

Axes: b batch, s query tokens, h key heads, g query heads of each, t context tokens, d key columns, v value columns, k
and p pages of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from mla_fx.cases import Case
from mla_fx.ops.common.check import FLOATS
from mla_fx.rule import AttentionPattern, Match, NearestMiss, NoMatch, Plan, Rule, attempt, contract, gathered, var
from mla_fx.rule.caches import GATHERS, block_table
from mla_fx.rule.operands import (
    Call,
    Expression,
    ViewOf,
    check_is_causal,
    known_causal,
    lengths,
    mask_operands,
    replacing,
    result,
    tensor,
    times,
)
from mla_fx.rule.readings import (
    Attention,
    Axes,
    Axis,
    Contraction,
    Paged,
    anchors,
    attention,
    axes,
    gathered_codes,
    is_coarser,
    ordered,
    product,
)

from . import cases
from .codes import channels, rounding

KEYS = gathered(var("key_cache", "k t h d"), var("block_table", "b t"), name="keys", over="k")
VALUES = gathered(var("value_cache", "p t h v"), var("block_table"), name="values", over="p")
OVER_PAGES = AttentionPattern(scores=(contract(var("query"), KEYS, name="scores", over="d"),), value=VALUES)

ONE = {"paged_attention": 1}


class PagedAttention(Rule):
    stage = "attention"
    after = ("mla_attention",)  # which also reads one latent for all heads in blocks
    accepts = (
        Case("heads repeated", cases.Serving, ONE),
        Case("scaled_dot_product_attention", cases.Fused, ONE),
        Case("grouped by einsum", cases.Grouped, ONE),
        Case("slots", cases.BySlots, ONE),
        Case("lengths", cases.ByLength, ONE),
        Case("a window", cases.Window, ONE),
        Case("codes", cases.Coded, ONE),
        Case("one latent", cases.OneLatent, {"latent_attention": 1}),
    )
    rejects = (
        Case("two tables", cases.TwoTables, because="block_table is not one tensor"),
        Case("first rows first", cases.RowsFirst, because="the rows of a block are not consecutive"),
        Case("a weight per key", cases.WeighedKeys, because="expected gathered rows, found mul"),
        Case("a scale per key", cases.CodedTokens, because="the scale of codes is not the same for all tokens"),
        Case("attention sink", cases.Sink, because="paged_attention has no operand for an attention sink"),
        Case("heads of values in another order", cases.HeadsOfValues, because="do not have the same heads"),
        Case("one head of values", cases.OneHeadOfValues, because="do not have the same heads"),
        Case("keys in a wider type", cases.WiderKeys, because="the cache is in torch.float32"),
    )

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return anchors(graph)

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        """No matches and no misses if no values are gathered; other rules report attention that is not read."""
        found = attempt(attention, anchor)
        if found is None or (found.value.origin.target not in GATHERS and gathered_codes(found.value) is None):
            return
        yield from OVER_PAGES.bindings(found, found.scores, nearest)

    def rewrite(self, match: Match) -> Plan:
        """`page` are the axes of the context that select blocks, `row` those within a block."""
        found, scores = match.reading(Attention, "attention"), match.reading(Contraction, "scores")
        keys, values = match.reading(Paged, "keys"), match.reading(Paged, "values")
        if found.sink is not None:
            raise NoMatch("paged_attention has no operand for an attention sink", found.node)
        b, t, h, d, v = match.dims("b t h d v")
        (page, row), _ = (paged.blocks_and_rows(t) for paged in (keys, values))
        outer = tuple(axis for part in found.index for axis in axes(part, "the attention's output", found.node))
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
                _pages(paged, (paged.axes, row, h, columns), dtype)
                for paged, columns in ((keys, d), (values, v))
            ]
            mask, lens, fill = _masks(found, (b, n, s, (*page, *row)), dtype)
            options = {"scale": scores.factor} | ({} if fill is None else {"fill": fill})
            operands = query, *caches, table, lens, mask, *channels(codes, ((h, d), (h, v)), dtype)
            operator = torch.ops.mla_fx.paged_attention.batched
            out = times(Call(operator, *operands, **options, **rounding(codes, dtype)), found.value_factor)
            new = replacing(found.node, found.index, result(out, (b, s, n, v)), padding=found.padding)
            return Plan(new, instead=instead, exact=(call for one in codes if one for call in one.calls))

        codes, stored = (keys.numbers, values.numbers), keys.dtype
        is_narrow = stored == values.dtype and is_coarser(stored, dtype) and match["query"].is_exact_in(stored)
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
    if found.dtype not in FLOATS or is_coarser(dtype, found.dtype):
        what = "the cache is" if found.numbers is None else "codes are dequantised"
        raise NoMatch(f"{what} in {found.dtype}; paged_attention computes in {dtype} here", found.node)
    if found.table.origin.meta["val"].device != found.node.meta["val"].device:
        raise NoMatch("the block table is on another device than the cache", found.table.origin)
    because = "reading the cache as pages of rows of heads would copy it"
    return ViewOf(tensor(found.pages, dims, read_by=found.node), found.pages.origin, because)
