"""A copy of a captured graph to edit: nodes inserted, operands replaced, fake values kept correct."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from mla_fx.graph.torch_private import share_storage

from .capture import Captured, copy_of, evaluate
from .program import Program, Way

aten = torch.ops.aten
ALL_USERS = -1


class InvalidError(Exception):
    """A mutation does not apply, or its result is not a program."""


class Bench:
    """`site` is the name of a node and the number of an operand, or ALL_USERS for its result."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.graph = copy.deepcopy(captured.gm.graph)
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.changed: set[Node] = set()
        self.place: Node | None = None
        self.inputs = dict(zip((node.name for node in self._placeholders()), captured.inputs, strict=True))
        self.held = {node.target: getattr(captured.gm, node.target) for node in self.graph.find_nodes(op="get_attr")}
        self.changes: list[tuple[str, str, float]] = []  # of inputs, between two calls
        self.way = Way()

    def program(self) -> Program:
        """Its code is not run, so it is not written either."""
        gm = _LazyGraphModule({name: copy_of(value) for name, value in self.held.items()}, self.graph)
        numbers = {name: number for number, name in enumerate(self.inputs)}
        changes = tuple((numbers[name], *rest) for name, *rest in self.changes)
        way, is_rounded = replace(self.way, changes=changes), self.captured.dtype != torch.float64
        return Program(gm, tuple(self.inputs.values()), way, is_rounded)

    def _placeholders(self) -> list[Node]:
        return self.graph.find_nodes(op="placeholder")

    def node(self, name: str) -> Node:
        if name not in self.nodes:
            raise InvalidError(f"no node is called {name}")
        return self.nodes[name]

    def value(self, name: str, operand: int) -> Node:
        node = self.node(name)
        return node if operand == ALL_USERS else operands(node)[operand]

    def insert(self, name: str, operand: int, emit: Callable[[Node], Node]) -> None:
        """Let the readers at this site read what `emit` makes of the value."""
        node, value = self.node(name), self.value(name, operand)
        if operand != ALL_USERS:
            self.place = node
            self.replace_operand(node, operand, emit(value))
            return
        users = [user for user in value.users if user.target is not aten.copy_.default or user.args[1] is value]
        self.place = self.after(value)
        new = emit(value)
        for user in users:
            for number, used in enumerate(operands(user)):
                if used is value and not (user.target is aten.copy_.default and number == 0):
                    self.replace_operand(user, number, new)

    def after(self, value: Node) -> Node:
        node = value.next
        while node.op == "placeholder":
            node = node.next
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node before the current place."""
        assert self.place is not None, "something is being inserted"
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        try:
            evaluate(node, self.captured)
        except Exception:
            self.graph.erase_node(node)
            raise
        return node

    def view(self, value: Node, shape: list[int]) -> Node:
        """A view, or a view of a copy if the strides do not allow one, like a traced reshape."""
        try:
            return self.call(aten.view.default, value, shape)
        except (RuntimeError, ValueError):
            value = self.call(aten.clone.default, value, memory_format=torch.contiguous_format)
            return self.call(aten._unsafe_view.default, value, shape)

    def replace_operand(self, node: Node, operand: int, new: Node) -> None:
        numbers = iter(range(len(operands(node))))
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda old: new if next(numbers) == operand else old)
        self.changed.add(node)

    def given(self, name: str) -> Tensor:
        """An input of the program, which may be replaced but not written, because mutants share it."""
        if not isinstance(self.inputs.get(name), Tensor):
            raise InvalidError(f"no input is called {name}")
        return self.inputs[name]

    def new_input(self, name: str, value: Tensor) -> Node:
        """One more input, the last."""
        with self.graph.inserting_after(self._placeholders()[-1]):
            node = self.graph.placeholder(name)
        self.inputs[node.name], self.nodes[node.name] = value, node
        node.meta["val"] = self.captured.mode.from_tensor(value.detach())
        return node

    def hold(self, name: str) -> None:
        """An input becomes a tensor in the graph itself."""
        value, old = self.given(name), self.node(name)
        self.held[name] = value
        with self.graph.inserting_before(self.after(old)):
            new = self.graph.create_node("get_attr", name)
        new.meta["val"] = old.meta["val"]
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)
        self.nodes[name] = new
        del self.inputs[name]

    def write(self, target: Node, value: Node) -> None:
        """Writes a value back into an input, last of all."""
        self.place = self.graph.output_node()
        self.call(aten.copy_.default, target, value)

    def output(self, value: Node) -> None:
        """Return one more value."""
        end = self.graph.output_node()
        end.args = ((*end.args[0], value),)

    def end(self) -> Node:
        """The place of the last reads: before the writes back into the inputs."""
        for node in self.graph.nodes:
            if node.op == "output" or node.target is aten.copy_.default:
                return node
        raise InvalidError("a graph ends with its output")

    def settle(self) -> None:
        """Update the fake values after everything that was changed, where they differ."""
        stale = set(self.changed)
        for node in list(self.graph.nodes):
            if node.op == "call_function" and (node in stale or any(value in stale for value in node.all_input_nodes)):
                old = node.meta["val"]
                self._evaluate(node)
                if node not in self.changed and _is_same_memory_of_its_own(node, old):
                    node.meta["val"] = old
                else:
                    stale.add(node)
        self.changed.clear()
        self.graph.lint()

    def _evaluate(self, node: Node) -> None:
        try:
            evaluate(node, self.captured)
        except (RuntimeError, ValueError):
            if node.target is not aten.view.default:
                raise
            self.place = node
            copied = self.call(aten.clone.default, node.args[0], memory_format=torch.contiguous_format)
            node.args = (copied, *node.args[1:])
            evaluate(node, self.captured)


def _is_same_memory_of_its_own(node: Node, old: Any) -> bool:
    """Says if an operator returned a new tensor of the same kind, and not a view, so that its users need no update."""
    new = node.meta["val"]
    if not isinstance(new, Tensor) or not isinstance(old, Tensor) or new.is_conj() or old.is_conj():
        return False
    if (new.shape, new.stride(), new.dtype) != (old.shape, old.stride(), old.dtype):
        return False
    inputs = map(tensor, node.all_input_nodes)
    return not any(value is None or share_storage(new, value) for value in inputs)


def operands(node: Node) -> list[Node]:
    """The operands of a node in the order of its arguments, with repetitions."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def tensor(node: Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)
