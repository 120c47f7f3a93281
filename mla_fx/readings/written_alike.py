"""Sizes that must be equal, because the program writes rows of the one at positions of the other."""

from __future__ import annotations

from collections.abc import Iterator

import sympy
import torch
from torch.fx import Graph, Node

from mla_fx.readings.integers import INTEGERS

from .calls import args_of
from .sizes import Size, at_most
from .views import shape_of

aten = torch.ops.aten


def written_alike(graph: Graph) -> dict[sympy.Symbol, Size]:
    """Pairs of sizes that the program's own writes require to be equal, though nothing else says so: two or more rows,
    or columns, are not broadcast."""
    same: dict[sympy.Symbol, Size] = {}
    for target in (aten.index_put.default, aten._unsafe_index_put.default):
        for node in graph.find_nodes(op="call_function", target=target):
            for size, found in _written_at(node):
                is_free = isinstance(size, sympy.Symbol) and size not in sympy.sympify(found).free_symbols
                if is_free and at_most(2, found):
                    same.setdefault(size, found)
    return same


def _written_at(node: Node) -> Iterator[tuple[Size, Size]]:
    """Pairs of sizes of a write at positions: the columns written and those of the rows, and the number of positions
    and that of the rows, which come first if the dimensions are not adjacent."""
    old, places, rows = args_of(node)[:3]
    used = {dim: where for dim, where in enumerate(places) if where is not None}
    if any(where.meta["val"].dtype not in INTEGERS for where in used.values()):
        return  # a boolean mask indexes as many dimensions as it has
    columns, written = shape_of(old)[max(used) + 1 :], shape_of(rows)
    yield from zip(reversed(columns), reversed(written), strict=False)
    counts = {shape_of(where) for where in used.values()}
    is_adjacent = max(used) - min(used) < len(used)
    behind = len(columns) if is_adjacent else len(shape_of(old)) - len(used)
    if len(counts) != 1 or len(written) <= behind:
        return
    count, *others = counts.pop() or (1,)
    if not others:
        yield count, written[-behind - 1]
