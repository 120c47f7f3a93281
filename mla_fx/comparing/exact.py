"""Runs an operator graph next to the compiled one: in its own precision, or in one that hardly rounds. No input is
written."""

import contextlib
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from mla_fx.graph.schemas import named_arguments, names_of, owner, written
from mla_fx.graph.torch_private import OpOverload, memory_of, tree_leaves, tree_map

aten = torch.ops.aten

COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Operators that read raw memory: wider numbers have other bytes.
BYTES = frozenset({aten.view.dtype})
MOVES = frozenset(
    {
        aten.clone.default, aten.contiguous.default, aten.copy.default, aten.lift_fresh_copy.default,
        aten._unsafe_view.default, aten.reshape.default, aten.repeat.default, aten.cat.default, aten.stack.default,
        aten.slice_scatter.default, aten.select_scatter.default, aten.constant_pad_nd.default,
    }
)  # fmt: skip
LOOKUPS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.embedding.default})
FILLS = frozenset({aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default})


@dataclass
class Results:
    """What a graph returns, what it would write to which input, and requested values, by their nodes."""

    outputs: list[Any]
    written: dict[int, Any]
    values: dict[str, Any]

    @property
    def all(self) -> list[Any]:
        """What is returned and what would be written."""
        return [*self.outputs, *self.written.values()]


class Dry(Interpreter):
    """Runs a graph in its own precision. Inputs that it writes are written in copies."""

    def __init__(self, gm: GraphModule, wanted: Collection[str] = ()) -> None:
        super().__init__(gm)
        self.wanted, self.values, self.written = frozenset(wanted), dict[str, Any](), frozenset[int]()

    def results(self, inputs: Sequence[Any]) -> Results:
        places = writes(self.graph)
        given = in_copies(inputs, [inputs[place] for place in places], self.as_compared)
        self.written = frozenset(memory_of(given[place]) for place in places)
        theirs = {memory_of(value) for value in inputs if isinstance(value, Tensor)}
        with torch.no_grad():
            outputs = [self._kept(value, theirs) for value in self.run(*given)]
        return Results(outputs, {place: self.as_compared(given[place]) for place in places}, self.values)

    def as_compared(self, value: Any) -> Any:
        return value

    def _kept(self, value: Any, writable: Collection[int]) -> Any:
        """The same, in memory that is not written afterwards."""
        value = self.as_compared(value)
        return value.clone() if isinstance(value, Tensor) and memory_of(value) in writable else value

    def run_node(self, n: Node) -> Any:
        value = self._of(n)
        if n.name in self.wanted:
            self.values[n.name] = self._kept(value, self.written)
        return value

    def _of(self, node: Node) -> Any:
        return super().run_node(node)


def writes(graph: Graph) -> dict[int, Node]:
    """The value that a graph writes last to each input, by the input's place."""
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    found = {
        places[one]: node.all_input_nodes[-1] if node.target is aten.copy_.default and target is one else node
        for node in graph.nodes
        for target in written(node)
        if (one := owner(target)) in places
    }
    return dict(sorted(found.items()))


def in_copies(
    values: Iterable[Any], shared: Iterable[Tensor], convert: Callable[[Tensor], Tensor] = lambda memory: memory
) -> list[Any]:
    """Values in copies of the memory that some tensors are in; what shared memory goes on sharing it."""
    memories = {*map(memory_of, shared)}
    copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or memory_of(value) not in memories:
            return value
        key = memory_of(value), value.dtype
        if key not in copies:
            whole = value.detach().new_empty(0).set_(value.detach().untyped_storage())
            made = convert(whole)
            copies[key] = made.clone() if made is whole else made
        return copies[key].as_strided(value.shape, value.stride(), value.storage_offset())

    return [copied(value) for value in values]


class Wide(Dry):
    """Runs a graph in a wide dtype: every floating value, cast and sum.

    Numbers in the graph, and values computed from them alone, keep their precision, because rules read them like that.
    Moved weights keep it until something is computed from them. An operator that supports no wide numbers gets its
    own."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype, wanted: Collection[str] = ()) -> None:
        super().__init__(gm, wanted)
        self.dtype = dtype
        self.numbers = {node for node in gm.graph.nodes if _is_number(node)}

    def _of(self, node: Node) -> Any:
        if node.op != "call_function" or node.target is operator.getitem:
            return super()._of(node)
        operands = [one for one in node.all_input_nodes if isinstance(one.meta["val"], Tensor)]
        if node in self.numbers or (operands and self.numbers.issuperset(operands)):
            self.numbers.add(node)
            return super()._of(node)
        if (moves(node) or node.target in LOOKUPS) and self._moves_own(node):
            return super()._of(node)
        for target in written(node):
            self.env[target] = widened(self.dtype, self.env[target])
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if isinstance(node.target, OpOverload) and node.target not in BYTES and not is_random(node):
            for dtype in dict.fromkeys((self.dtype, torch.float32)):
                with contextlib.suppress(RuntimeError, TypeError, ValueError):
                    return widened(self.dtype, self.call_function(node.target, *widened(dtype, (args, kwargs))))
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: _own(one, self.env[one]))
        return widened(self.dtype, self.call_function(node.target, args, kwargs))

    def as_compared(self, value: Any) -> Any:
        return widened(self.dtype, value)

    def _moves_own(self, node: Node) -> bool:
        """Whether all operands still have their own precision, so moving them keeps it. They may be large, so they are
        widened when they are used."""
        operands = [one for one in node.all_input_nodes if isinstance(self.env[one], Tensor)]
        dtypes = {one.meta["val"].dtype for one in operands if one.meta["val"].is_floating_point()}
        is_own = all(self.env[one].dtype == one.meta["val"].dtype for one in operands)
        return is_own and dtypes <= {value.dtype for value in tree_leaves(node.meta["val"])}


def _is_number(node: Node) -> bool:
    """A tensor with the same number everywhere."""
    if node.op == "get_attr":
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.numel() == 1
    return node.target in FILLS


def moves(node: Node) -> bool:
    """Whether a call returns numbers of its operands as they are, in other places."""
    target = node.target
    return target is operator.getitem or target in MOVES or (isinstance(target, OpOverload) and target.is_view)


def is_random(node: Node) -> bool:
    """Whether an operator draws random numbers; not one that merely might, for a dropout of 0."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return "dropout_p" not in names_of(node.target) or bool(dict(named_arguments(node)).get("dropout_p", 0.0))


def widened(dtype: torch.dtype, value: Any) -> Any:
    """Floating tensors, and floating dtypes, in a wide dtype."""
    kinds = {**dict.fromkeys(FLOATS, dtype), torch.complex64: COMPLEX[dtype], torch.complex128: COMPLEX[dtype]}

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(kinds.get(leaf.dtype, leaf.dtype))
        return kinds.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return tree_map(wide, value)


def _own(node: Node, value: Any) -> Any:
    """A value in its dtype in the graph."""
    fake = node.meta.get("val")
    return value.to(fake.dtype) if isinstance(value, Tensor) and isinstance(fake, Tensor) else value
