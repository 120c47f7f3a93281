"""A context gathered through a block table, and attention over it, as attention over the pages themselves.

    attention(query, query_rope, kv_cache[block_table], kr_cache[block_table])

Spellings: blocks looked up (`cache[block_table]`, index_select, embedding); slots computed from a table, or given per
token, which are blocks of one row. The rows in a table may be any rows: the operator reads the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from mla_fx.cases import Case
from mla_fx.ops.emitted.attention.codes import SCALES
from mla_fx.rule import CallPattern, Match, NoMatch, Operand, Plan, Rule, var
from mla_fx.rule.caches import block_table, check_memory, is_looked_up, paged
from mla_fx.rule.operands import ATTENTION, Call, Expression, Replacement, call_with, tensor
from mla_fx.rule.readings import (
    Axes,
    Dims,
    Element,
    Paged,
    Reading,
    axes_of,
    composite,
    computed_between,
    element_of,
    fresh,
    leaves,
    named_argument,
    renamed,
    resolve,
    shape_of,
    without_digits,
)

from . import cases

# b and t: batch and context, c latent and r rotary columns
CACHES = {"kv_cache": Operand("btc", var("kv_cache")), "kr_cache": Operand("btr", var("kr_cache"))}


class PagedContext(Rule):
    stage = "context"
    targets = (ATTENTION,)
    pattern = CallPattern(CACHES, fixed="bt")
    accepts = (Case("blocks looked up", cases.Gathered, {"mla_prolog": 1, "latent_attention": 1}),)
    rejects = (Case("two tables", cases.OtherTable, because="looked up by different tables"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        contiguous = (node for node in super().anchors(graph) if named_argument(node, "block_table") is None)
        return (node for node in contiguous if is_looked_up(element_of(named_argument(node, "kv_cache"))))

    def rewrite(self, match: Match) -> Plan:
        """All caches are pages of one size, looked up in one table: `page` are the axes of the context that select
        blocks, `row` those within a block."""
        b, t, c, r = match.dims("b t c r")
        old = match.reading(Reading, "call").node
        given = {"kv_cache": (match["kv_cache"], c), "kr_cache": (match["kr_cache"], r), **_scales(old, b, t)}
        read = {name: paged(element) for name, (element, _) in given.items()}
        table = read["kv_cache"].table
        if (other := next((found for found in read.values() if found.table != table), None)) is not None:
            raise NoMatch("latent and rotary key are looked up by different tables", other.table.origin)
        parted = without_digits(part for found in read.values() for part in found.indices)
        if parted is None:
            raise NoMatch("latent and rotary key are gathered in incompatible blocks", read["kr_cache"].node)
        read = {name: renamed(found, parted) for name, found in read.items()}
        t, c, r = (leaves(part, parted) for part in (t, c, r))
        (page, row), *_ = (found.blocks_and_rows(t) for found in read.values())
        is_nz = len(c) > 1 or len(r) > 1
        pages = {name: _pages(found, row, leaves(given[name][1], parted), is_nz=is_nz) for name, found in read.items()}
        blocks = block_table(b, page, *read.values())
        moved = (  # rounds nothing, also if these are codes of 8 bits
            call
            for name, (element, _) in given.items()
            for call in computed_between(element.origin, {read[name].pages.origin})
        )
        return Plan(Replacement(old, call_with(old, **pages, block_table=blocks)), exact=moved)


class PagedCodes(PagedContext):
    """The same once codes are read."""

    name = "paged_context_codes"
    stage = "cache"
    after = ("coded_latents",)
    accepts = (Case("codes looked up", cases.GatheredCodes, {"latent_attention": 1}),)
    rejects = (Case("another table of scales", cases.OtherTableOfScales, because="looked up by different tables"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        return (node for node in super().anchors(graph) if named_argument(node, "kv_scales") is not None)


def _scales(call: Node, b: Axes, t: Axes) -> dict[str, tuple[Element, Axes]]:
    """Scales of codes that differ between the rows of a context, and their columns."""
    found = {}
    for name in SCALES.values():
        scales = named_argument(call, name)
        if scales is None or shape_of(scales)[:2] == (1, 1):
            continue
        columns = fresh(shape_of(scales)[2])
        element = resolve(scales, (composite(b), composite(t), columns))
        found[name] = element, axes_of(columns) or ()
    return found


def _pages(found: Paged, row: Axes, columns: Axes, *, is_nz: bool) -> Expression:
    """Pages [Blocks, BlockSize, Columns], or in FRACTAL_NZ [Blocks, Columns/n0, BlockSize, n0]."""
    dims: Dims = (found.axes, row, (*columns, *(axes_of(found.byte) or ())))
    if is_nz:
        dims = found.axes, columns[:-1], row, columns[-1:]
        check_memory(found.pages, dims)
    pages = tensor(found.pages, dims)
    return pages if found.viewed is None else Call(torch.ops.aten.view.dtype, pages, found.viewed)
