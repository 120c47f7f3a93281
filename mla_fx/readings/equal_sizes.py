"""Sizes that must be equal: those that are because the program writes rows of the one at positions of the other, and
what a refusal says about those that are not proved, or not in order: their symbols, and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy
import torch
from torch.fx import Graph, Node

from mla_fx.graph.provenance import label_of
from mla_fx.readings.integers import INTEGERS

from .calls import args_of
from .sizes import Size, at_most, size_of
from .views import shape_of

aten = torch.ops.aten
EQUAL, AT_MOST, MULTIPLE = "{} == {}", "{} <= {}", "{} % {} == 0"


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


def unproved(graph: Graph, left: Size, relation: str, right: Size) -> str:
    """Appended to a reason: the sizes of the unproved relation, and the torch._check that would prove it. Empty for
    numbers, for which it is known."""
    if isinstance(left, int) and isinstance(right, int):
        return ""
    names = _names(graph, left, right)
    unknown, check = (relation.format(*(_written(size, known) for size in (left, right))) for known in ({}, names))
    return f": {unknown} is not known{meant(graph, left, right)}; torch._check({check}) in the model says so"


def meant(graph: Graph, *sizes: Size) -> str:
    """Which sizes of graph inputs the symbols are."""
    return "".join(f", {symbol} being {name}" for symbol, name in _names(graph, *sizes).items())


def _written(size: Size, names: Mapping[sympy.Symbol, str]) -> str:
    """A size in the words of the model."""
    expression = sympy.sympify(size).xreplace({symbol: sympy.Symbol(name) for symbol, name in names.items()})
    return str(expression) if expression.is_Atom else f"({expression})"


def _names(graph: Graph, *sizes: Size) -> dict[sympy.Symbol, str]:
    """The symbols with the first graph input that has each, in order."""
    symbols = {symbol for size in sizes for symbol in sympy.sympify(size).free_symbols}
    names: dict[sympy.Symbol, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        for size, name in _sizes_of(node):
            if size in symbols:
                names.setdefault(size, name)
    return names


def _sizes_of(node: Node) -> Iterator[tuple[Size, str]]:
    """The sizes of a graph input, or the size that it is, in the words of the model."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield from ((size, f"{label_of(node)}.shape[{dim}]") for dim, size in enumerate(shape_of(node)))
    elif isinstance(value, torch.SymInt):
        yield size_of(value), label_of(node)
