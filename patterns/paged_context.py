"""A context gathered through a block table, and attention over it, as attention over the pages themselves.

    latent_attention(query, query_rope, kv_cache[block_table], kr_cache[block_table])

Spellings: blocks looked up (`cache[block_table]`, index_select, embedding); slots computed from a table, or given per
token, which are blocks of one row. The rows in a table may be any rows: the operator reads the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.fx import Graph, Node

from mla_fx.cases import B, Case, Layer, T
from mla_fx.rule import CallPattern, Match, NoMatch, Operand, Plan, Rule, var
from mla_fx.rule.caches import GATHERS, block_table, check_memory, paged
from mla_fx.rule.indices import Axes, Axis, Dims, Index, axes_of, renamed, without_digits
from mla_fx.rule.operands import ATTENTION, Call, Expression, Replacement, tensor
from mla_fx.rule.readings import Paged, Reading, args_of, element_of, named_argument, options_of

# b and t: batch and context, c latent and r rotary columns
CACHES = {"kv_cache": Operand("btc", var("kv_cache")), "kr_cache": Operand("btr", var("kr_cache"))}


BLOCK = 4


class _Gathered(Layer):
    """Caches in pages, written by position and read through a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.arange(B * T // BLOCK).view(B, -1))

    def store(self, latent: Tensor, k_rope: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        tables = self.tables()
        written = super().store(latent, k_rope, position)
        pages = (cache.reshape(-1, BLOCK, cache.shape[-1]) for cache in written)
        latents, keys = (cache[table].view(B, 1, T, -1) for cache, table in zip(pages, tables, strict=True))
        return latents, keys

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table


class _OtherTable(_Gathered):
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.table, self.table.flip(0)


class PagedContext(Rule):
    stage = "context"
    targets = ATTENTION
    pattern = CallPattern(CACHES, fixed="bt")
    yields_to_target = True
    accepts = (Case("blocks looked up", _Gathered, {"mla_prolog": 1, "latent_attention": 1}),)
    rejects = (Case("two tables", _OtherTable, because="looked up by different tables"),)

    def anchors(self, graph: Graph) -> Iterator[Node]:
        contiguous = (node for node in super().anchors(graph) if named_argument(node, "block_table") is None)
        return (node for node in contiguous if element_of(named_argument(node, "kv_cache")).origin.target in GATHERS)

    def rewrite(self, match: Match) -> Plan:
        """Both caches are pages of one size, looked up in one table: `page` are the axes of the context that select
        blocks, `row` those within a block."""
        b, t, c, r = match.dims("b t c r")
        latent, keys = (paged(match[name]) for name in CACHES)
        if latent.table != keys.table:
            raise NoMatch("latent and rotary key are looked up by different tables", keys.table.origin)
        parted = without_digits(part for found in (latent, keys) for part in found.indices)
        if parted is None:
            raise NoMatch("latent and rotary key are gathered in incompatible blocks", keys.node)
        latent, keys = (renamed(found, parted) for found in (latent, keys))
        t, c, r = (tuple(leaf for axis in part for leaf in _leaves(axis, parted)) for part in (t, c, r))
        (page, row), _ = (found.blocks_and_rows(t) for found in (latent, keys))
        is_nz = len(c) > 1 or len(r) > 1
        pages = {
            name: tensor(found.pages, _dims(found, row, columns, is_nz=is_nz))
            for name, found, columns in zip(CACHES, (latent, keys), (c, r), strict=True)
        }
        old = match.reading(Reading, "call").node
        return Plan(Replacement(old, _with_pages(old, pages, block_table(b, page, latent, keys))))


def _leaves(axis: Axis, parted: Mapping[Axis, Index]) -> Axes:
    return axes_of(parted[axis]) or () if axis in parted else (axis,)


def _dims(found: Paged, row: Axes, columns: Axes, *, is_nz: bool) -> Dims:
    """The dimensions of pages: [Blocks, BlockSize, Columns], or in FRACTAL_NZ [Blocks, Columns/n0, BlockSize, n0]."""
    if not is_nz:
        return found.axes, row, columns
    dims = found.axes, columns[:-1], row, columns[-1:]
    check_memory(found.pages, dims)
    return dims


def _with_pages(old: Node, pages: dict[str, Expression], table: Expression) -> Call:
    """The call with pages for its contexts and its other operands unchanged."""
    gathered = {named_argument(old, name): new for name, new in pages.items()}
    args = [gathered.get(value, value) if isinstance(value, Node) else value for value in args_of(old)]
    return Call(old.target, *args, **{**options_of(old), "block_table": table})
