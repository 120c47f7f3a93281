"""Attention in parts of a context that are merged by sums of exponentials, and not by logarithms, as in flash
attention's loop: what is computed from these sums is a function of attention and its logarithms, and may be a merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.walk import unread_without

from .arithmetic import EXPONENTIALS
from .attention import Attention, weighted_by
from .axes import Index
from .contraction import PRODUCTS
from .element import Element, readers
from .merged_parts import Merge, merge, merge_before, merges
from .reading import Reading
from .row_arithmetic import Rows
from .rows import MOVES, exponentials, weighted_row
from .softmax import Softmax

aten = torch.ops.aten


@dataclass(frozen=True)
class MergedSums(Reading):
    """`parts` of attention, merged at `index` of `node`, where each is read as well. Rows that some of the parts in
    `blanks` do not see are NaN, and if `blank_if_empty` those that no part sees; else they are zero. `sink` is as in
    Merge."""

    index: tuple[Index, ...]
    parts: tuple[Attention, ...]
    blanks: frozenset[int]
    blank_if_empty: bool
    sink: Element | None

    @property
    def constants(self) -> tuple[object, ...]:
        return self.blanks, self.blank_if_empty


def weights(graph: Graph) -> Iterator[Node]:
    """The exponentials that are summed, and multiplied by values."""
    for target in EXPONENTIALS:
        for node in graph.find_nodes(op="call_function", target=target):
            read_by = {user.target for user in readers(node, MOVES)}
            if aten.sum.dim_IntList in read_by and not PRODUCTS.isdisjoint(read_by):
                yield node


def ends_of_sums(graph: Graph) -> Iterator[Node]:
    """The last values that arithmetic computes from several products of such weights and values."""
    products = [user for exp in weights(graph) for user in readers(exp, MOVES) if user.target in PRODUCTS]
    return merges(products) if len(products) > 1 else iter(())


def merged_sums(node: Node) -> MergedSums:
    """The nearest merge of sums among a value and those that arithmetic computes it from. Raises NoMatch with the
    reason if there is none."""
    found = merge_before(node, lambda node: _alone(merge(node, Rows(end=node, are_several=True))))
    return MergedSums(found.node, found.index, _parts(found), found.blanks, found.blank_if_empty, found.sink)


def _parts(found: Merge) -> tuple[Attention, ...]:
    return tuple(map(_attention, found.outs))


def _alone(found: Merge) -> Merge:
    """Raise NoMatch if a merge does not replace all that its exponentials are for."""
    if found.cleans:
        raise NoMatch("sums that are infinite or NaN are left out", found.node)
    unread = unread_without([found.node])
    for exp in {exp for part in _parts(found) for exp in exponentials(part.node)}:
        others = [user for user in readers(exp, MOVES) if user not in unread]
        if others:
            raise NoMatch(f"exponentials that are merged are also read by {name_of(others[0])}", exp)
    return found


def _attention(product: Element) -> Attention:
    weighted, row = weighted_row(product)
    if row.columns.read is not row.columns.whole:
        raise NoMatch("only some of the exponentials of a row multiply values", row.node)
    return weighted_by(row.node, product.origin, product.index, weighted, Softmax.of(row, None, zeroes=True))
