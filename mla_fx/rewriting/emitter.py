"""Adding calls to a graph."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import RULE
from mla_fx.readings.sizes import Size, size_of
from mla_fx.readings.views import shape_of

from .fake_values import KnownValues, hashable

aten = torch.ops.aten


class Emitter:
    """Adds calls to one graph, each with what is known of its value; equal calls are made once.

    `added` lists the new nodes, `sources` the operations from which their operands were read, both since `at` began.
    `refuses_positions` is what the target says of itself."""

    def __init__(self, graph: Graph, *, refuses_positions: bool = True) -> None:
        self.graph, self.refuses_positions = graph, refuses_positions
        self.known = KnownValues(graph)
        self.added: list[Node] = []
        self.sources: set[Node] = set()
        self.traced: dict[Any, torch.fx.GraphModule] = {}
        self._calls: dict[Any, Node] = {}
        self._anchor: Node | None = None
        self._sizes: dict[Size, Node] | None = None

    @contextlib.contextmanager
    def at(self, anchor: Node, rule: str) -> Iterator[None]:
        """New nodes go before `anchor`, come from its source line, and say which rule made them.

        If the rule refuses after all, they are taken back."""
        self.added, self.sources, self._anchor = [], set(), anchor
        try:
            with self.graph.inserting_before(anchor):
                yield
        except NoMatch:
            self.roll_back()
            raise
        for node in self.added:
            node.meta[RULE] = rule
            for name in ("stack_trace", "nn_module_stack", "seq_nr"):
                if name in anchor.meta and name not in node.meta:
                    node.meta[name] = anchor.meta[name]

    def roll_back(self) -> None:
        """Removes what was added: a rewrite that was refused leaves no trace."""
        while self.added:
            node = self.added.pop()
            if not node._erased:
                self.graph.erase_node(node)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call node with its value's metadata. The same call made before is reused."""
        key = (target, hashable(args), hashable(kwargs))
        if key in self._calls and not self._calls[key]._erased:
            return self._calls[key]
        value = self.known.of_call(target, args, kwargs)
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        self._calls[key] = node
        self.added.append(node)
        return node

    def copy(self, node: Node, copies: Mapping[Node, Node]) -> Node:
        """A call of another graph, with the values that its operands have here. The same call made before is reused."""
        args, kwargs = (torch.fx.map_arg(value, copies.__getitem__) for value in (node.args, node.kwargs))
        key = (node.target, hashable(args), hashable(kwargs))
        made = self._calls.get(key)
        if made is not None and not made._erased and (self._anchor is None or made < self._anchor):
            return made
        self._calls[key] = new = self.graph.node_copy(node, copies.__getitem__)
        self.added.append(new)
        return new

    def module(self, module: GraphModule) -> Node:
        """A module of the graph's own that an operator calls."""
        owner = self.graph.owning_module
        assert owner is not None, "a graph that is compiled belongs to a module"
        name = f"mla_fx_{len(list(owner.children()))}"
        owner.add_submodule(name, copy.copy(module))
        node = self.graph.get_attr(name)
        self.added.append(node)
        return node

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def scaled(self, node: Node, factor: float) -> Node:
        return node if factor == 1.0 else self.call(aten.mul.Tensor, node, factor)

    # --- sizes ---------------------------------------------------------------------------------------------------

    def size(self, size: Size) -> Any:
        """A size as an operator's argument: a number, or the node that computes it."""
        if isinstance(size, int):
            return size
        if self._sizes is None:
            self._sizes = _known_sizes(self.graph)
        known = self._sizes.get(size)
        if known is None or known._erased or self._is_behind(known):
            self._sizes[size] = self._computed(size)
        return self._sizes[size]

    def _is_behind(self, node: Node) -> bool:
        """The node does not stand before the new ones, which may be what it is computed from."""
        return self._anchor is not None and not node < self._anchor

    def _computed(self, size: Size) -> Node:
        for node in itertools.takewhile(lambda node: not self._is_behind(node), self.graph.nodes):
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and size in (sizes := list(shape_of(node))):
                return self.call(aten.sym_size.int, node, sizes.index(size))
        if not isinstance(size, (sympy.Mul, sympy.Add)):
            raise NoMatch(f"the size {size} is not known to the graph")
        combine = operator.mul if isinstance(size, sympy.Mul) else operator.add
        first, *rest = map(self._argument, size.args)
        for part in rest:
            first = self.call(combine, first, part)
        assert isinstance(first, Node), "a symbolic size is computed by a node"
        return first

    def _argument(self, size: sympy.Expr) -> Any:
        return int(size) if size.is_Integer else self.size(size)


def _known_sizes(graph: Graph) -> dict[Size, Node]:
    sizes: dict[Size, Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(size_of(value), node)
    return sizes
