"""Attention over keys and values of each head in pages, which are gathered through a block table, as one operator that
reads the pages themselves: how serving engines keep what is not latent.

    score[b,n,s,t] = scale * (query . key_cache[block_table][b,t,h]) + mask,  n = h * group + g
    out[b,n,s,v]   = sum_t softmax(score)[t] value_cache[block_table][b,t,h,v]

Seen with blocks looked up (`cache[block_table]`, index_select, embedding), with slots computed from a table, or given
for each token, which are blocks of one row; with heads repeated, expanded, or grouped by a view. Which rows a table
names is of no matter: the operator reads the same ones.

Masks that are proved to hide exactly the keys behind a position or a length become `context_lens`; all others stay
masks. The operator sums scores in float32 at least and rounds probabilities to the type in which they meet the values,
as the program does; where that rounds anything coarser, the engine refuses.

Axes: b batch, s query tokens, h key heads, g query heads of each, t context tokens, d key columns, v value columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.functional import scaled_dot_product_attention

from mla_fx.binding import Match
from mla_fx.cases import HE, B, Case, S, T
from mla_fx.emitter import Emitter
from mla_fx.errors import NoMatch
from mla_fx.layout import Axes, axes, result, tensor
from mla_fx.masks import emit_masks
from mla_fx.ops.common.check import FLOATS
from mla_fx.match import AttentionPattern, NearestMiss, contract, gathered, var
from mla_fx.readings.axes import Axis, Index, extent
from mla_fx.readings.contraction import Contraction, contraction
from mla_fx.readings.element import Element, element_of, is_coarser
from mla_fx.readings.paged import GATHERS, Paged
from mla_fx.readings.sizes import at_most, product
from mla_fx.readings.softmax import Attention, anchors, attention, weighted_sum
from mla_fx.replacement import Replacement, replaced
from mla_fx.rule import Rule

aten = torch.ops.aten

KEYS = gathered(var("key_cache"), var("block_table"), name="keys")
VALUES = gathered(var("value_cache"), var("block_table"), name="values")
OVER_PAGES = AttentionPattern(scores=(contract(var("query"), KEYS, name="scores"),), value=VALUES)


@dataclass(frozen=True)
class Facts:
    """What is attended to, and the axes that each dimension of the operands runs over: `page` those of the context by
    which blocks are looked up, `row` those within a block."""

    match: Match
    found: Attention
    scores: Contraction
    keys: Paged
    values: Paged
    b: Axes
    s: Axes
    h: Axes
    g: Axes
    page: Axes
    row: Axes
    d: Axes
    v: Axes


class PagedAttention(Rule[Facts]):
    stage = "attention"
    yields_to_target = True

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (anchor for anchor in anchors(graph) if _attends_to_gathered(anchor))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        found = attention(anchor)
        if not found.scores:
            contraction(found.masks[0].element)  # which says what was found in the place of a product
        yield from OVER_PAGES.bindings(found, found.scores, nearest)

    def check(self, match: Match) -> Facts:
        found, scores = match.reading(Attention, "attention"), match.reading(Contraction, "scores")
        keys, values = match.reading(Paged, "keys"), match.reading(Paged, "values")
        if found.sink is not None:
            raise NoMatch("an attention sink, which paged_attention has no operand for", found.node)
        t, d = axes(found.keys, "the context", found.node), scores.axes
        (page, row), _ = (paged.blocks_and_rows(t) for paged in (keys, values))
        outer = tuple(axis for part in found.index for axis in axes(part, "the attention's output", found.node))
        b = _in_order(keys.table.axes - {*t}, outer)
        own = {*keys.block.axes, *values.block.axes, *row}
        h = _in_order(keys.pages.axes - own - {*d}, outer)
        v = _in_order(values.pages.axes - own - {*h}, outer)
        if not set(h) <= values.pages.axes or not {*h, *v} <= set(outer):
            raise NoMatch("keys and values are not of the same heads", values.node)
        if not h and _are_columns(match["value_cache"], match["key_cache"], keys, values):
            raise NoMatch("the values are columns of the keys, as latents are: latent_attention is for those", keys.node)
        rows = match["query"].axes - {*b, *h, *d}
        if not rows.isdisjoint(v):
            raise NoMatch("keys and values are not of the same heads", values.node)
        masked = {axis for mask in found.masks for axis in mask.element.axes}
        masked |= found.causal.rows.axes if found.causal is not None else set()
        s, g = (_in_order(part, outer) for part in (rows & masked, rows - masked))
        return Facts(match, found, scores, keys, values, b, s, h, g, page, row, d, v)

    def rewrite(self, emit: Emitter, facts: Facts) -> Iterator[Replacement]:
        match, found, b, s = facts.match, facts.found, facts.b, facts.s
        n, dtype = (*facts.h, *facts.g), found.node.meta["val"].dtype
        query = tensor(emit, match["query"], (b, s, n, facts.d), dtype=dtype, expand=True)
        caches = [
            _pages(emit, paged, (axes(paged.block, "the blocks", paged.node), facts.row, facts.h, columns), dtype)
            for paged, columns in ((facts.keys, facts.d), (facts.values, facts.v))
        ]
        table = tensor(emit, facts.keys.table, (b, facts.page), expand=True)
        mask, lens, fill = _masks(emit, facts, (b, n, s, (*facts.page, *facts.row)), dtype)
        options = {"scale": facts.scores.factor} | ({} if fill is None else {"fill": fill})
        operator = torch.ops.mla_fx.paged_attention.batched
        out = emit.scaled(emit.call(operator, query, *caches, table, lens, mask, **options), found.value_factor)
        yield replaced(emit, found.node, found.index, result(out, (b, s, n, facts.v)), padding=found.padding)


def _masks(
    emit: Emitter, facts: Facts, dims: tuple[Axes, Axes, Axes, Axes], dtype: torch.dtype
) -> tuple[Node | None, Node | None, float | None]:
    """A mask, or lengths, and with what scores are filled."""
    found, s = facts.found, facts.s
    if found.causal is None:
        return emit_masks(emit, found, dims, dtype)
    if found.masks or axes(found.causal.rows, "the query", found.node) != s:
        raise NoMatch("is_causal counts the tokens of several sequences or heads as those of one", found.node)
    device, steps = found.node.meta["val"].device, emit.size(product(axis.size for axis in s))
    return None, emit.call(aten.full.default, [1], steps, dtype=torch.int64, device=device), None


def _attends_to_gathered(anchor: Node) -> bool:
    """Something that enters the product with the probabilities is gathered, whatever else differs."""
    output = weighted_sum(anchor)
    values = anchor.args[2:3] if output is None else output.args[:2]
    return any(element_of(value).origin.target in GATHERS for value in values if isinstance(value, Node))


def _in_order(found: frozenset[Axis], outer: Axes) -> Axes:
    return tuple(sorted(found, key=lambda axis: (outer.index(axis) if axis in outer else len(outer), axis.serial)))


def _are_columns(values: Element, keys: Element, value_pages: Paged, key_pages: Paged) -> bool:
    """Some numbers are in both."""
    if values.origin is not keys.origin:
        return False
    return all(_overlap(one, other) for one, other in zip(values.index, keys.index, strict=True))


def _overlap(one: Index, other: Index) -> bool:
    pairs = ((one, other), (other, one))
    return not any(at_most(left.offset + extent(left), right.offset) for left, right in pairs)


def _pages(emit: Emitter, found: Paged, dims: tuple[Axes, ...], dtype: torch.dtype) -> Node:
    """A view of a cache, as a copy of all of it would cost more than what is gathered."""
    held = found.pages.dtype
    if held not in FLOATS or is_coarser(dtype, held):
        raise NoMatch(f"the cache is in {held}, and paged_attention computes in {dtype} here", found.node)
    if found.table.origin.meta["val"].device != found.node.meta["val"].device:
        raise NoMatch("the block table is on another device than the cache", found.table.origin)
    pages = tensor(emit, found.pages, dims)
    emit.sources.add(found.node)  # which holds what the pages hold
    memory, held = (node.meta["val"].untyped_storage()._cdata for node in (pages, found.pages.origin))
    if memory != held:
        raise NoMatch("the cache would have to be copied to be read as pages of rows of heads", found.node)
    return pages
