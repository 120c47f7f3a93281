"""What a refusal says about sizes that must be equal, or in order, without proof: their symbols, and a remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import sympy
import torch
from torch.fx import Graph, Node

from mla_fx.graph.provenance import label_of

from .sizes import Size, size_of
from .views import shape_of

EQUAL, AT_MOST, MULTIPLE = "{} == {}", "{} <= {}", "{} % {} == 0"


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
