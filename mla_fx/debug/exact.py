"""Runs an operator graph next to the compiled one: in its own precision, or in one that hardly rounds. Nothing is
written, so nothing has to be copied first."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from mla_fx.errors import VerificationError
from mla_fx.graph.aliasing import written
from mla_fx.graph.torch_private import OpOverload, memory_of, tree_leaves, tree_map
from mla_fx.readings.paged import GATHERS
from mla_fx.readings.views import MOVERS

aten = torch.ops.aten

COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Operators that read raw memory: wider numbers have other bytes.
BYTES = frozenset({aten.view.dtype})
# Operators that only move or select numbers, of tensors that may be large: the result is widened when it is used.
KEEPS = MOVERS.keys() | GATHERS
FILLS = frozenset({aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default})
DRAWS = 16  # of scores within their errors, for which a choice counts as open


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
    """Runs a graph in its own precision, without its effects on its inputs."""

    def __init__(self, gm: GraphModule, wanted: Collection[str] = ()) -> None:
        super().__init__(gm)
        self.places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.written: dict[int, Any] = {}
        self.wanted, self.values = frozenset(wanted), dict[str, Any]()

    def results(self, inputs: Sequence[Any]) -> Results:
        with torch.no_grad():
            outputs = self.run(*inputs)
        memories = {memory_of(value) for value in inputs if isinstance(value, Tensor)}

        def copied(value: Any) -> Any:
            """Called before the memory of an input is written."""
            value = self.as_compared(value)
            is_shared = isinstance(value, Tensor) and memory_of(value) in memories
            return value.clone() if is_shared else value

        written = {place: copied(value) for place, value in self.written.items()}
        return Results([copied(value) for value in outputs], written, self.values)

    def as_compared(self, value: Any) -> Any:
        """A value in the form in which it is compared."""
        return value

    def run_node(self, n: Node) -> Any:
        value = self._of(n)
        if n.name in self.wanted:
            self.values[n.name] = self.as_compared(value)
        return value

    def _of(self, node: Node) -> Any:
        if not written(node):
            return super().run_node(node)
        target, source = node.all_input_nodes[0], node.all_input_nodes[-1]
        if node.target is not aten.copy_.default or target not in self.places:
            raise VerificationError(f"{node.target} writes a value that is not a graph input, which verify cannot undo")
        old, new = self.env[target], self.env[source]
        self.written[self.places[target]] = value = new if new.shape == old.shape else new.expand(old.shape)
        return value


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
        if node.op != "call_function" or node.target is operator.getitem or written(node):
            return super()._of(node)
        operands = [one for one in node.all_input_nodes if isinstance(one.meta["val"], Tensor)]
        if node in self.numbers or (operands and self.numbers.issuperset(operands)):
            self.numbers.add(node)
            return super()._of(node)
        if node.target in KEEPS and self._moves_own(node):
            return super()._of(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if isinstance(node.target, OpOverload) and node.target not in BYTES and not is_random(node):
            for dtype in dict.fromkeys((self.dtype, torch.float32)):
                with contextlib.suppress(RuntimeError, TypeError, ValueError):
                    return _as(self.dtype, self.call_function(node.target, *_as(dtype, (args, kwargs))))
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: _own(one, self.env[one]))
        return _as(self.dtype, self.call_function(node.target, args, kwargs))

    def as_compared(self, value: Any) -> Any:
        return _as(self.dtype, value)

    def _moves_own(self, node: Node) -> bool:
        """Whether all operands still have their own precision, so moving them keeps it."""
        operands = [one for one in node.all_input_nodes if isinstance(self.env[one], Tensor)]
        dtypes = {one.meta["val"].dtype for one in operands if one.meta["val"].is_floating_point()}
        is_own = all(self.env[one].dtype == one.meta["val"].dtype for one in operands)
        return is_own and dtypes <= {node.meta["val"].dtype}


def _is_number(node: Node) -> bool:
    """A tensor with the same number everywhere."""
    if node.op == "get_attr":
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.numel() == 1
    return node.target in FILLS


def is_random(node: Node) -> bool:
    """Whether an operator draws random numbers; not one that merely might, for a dropout of 0."""
    if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0))


def _as(dtype: torch.dtype, value: Any) -> Any:
    """Floating tensors, and floating dtypes, in a wide dtype."""
    kinds = {**dict.fromkeys(FLOATS, dtype), torch.complex64: COMPLEX[dtype], torch.complex128: COMPLEX[dtype]}

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(kinds.get(leaf.dtype, leaf.dtype))
        return kinds.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    return tree_map(widened, value)


def _own(node: Node, value: Any) -> Any:
    """A value in its dtype in the graph."""
    fake = node.meta.get("val")
    return value.to(fake.dtype) if isinstance(value, Tensor) and isinstance(fake, Tensor) else value


# --- what rounding may decide ----------------------------------------------------------------------------------------


def choices(graph: Graph) -> list[Node]:
    """Calls that compute integers or flags from floating values: the best experts, a token, a comparison."""
    calls = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    return [node for node in calls if _is_choice(node) and not {math.inf, -math.inf} & {*map(_number, node.args)}]


def _is_choice(node: Node) -> bool:
    results = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    operands = (one.meta.get("val") for one in node.all_input_nodes)
    is_made_of_floats = any(isinstance(value, Tensor) and value.is_floating_point() for value in operands)
    return is_made_of_floats and any(not value.is_floating_point() and not value.is_complex() for value in results)


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) else None


def undecided(graph: Graph, plain: Mapping[str, Any], exact: Mapping[str, Any]) -> set[Node]:
    """What depends on random numbers, or on a choice that rounding may flip: errors of `plain` values against `exact`
    ones, times four."""
    found: set[Node] = set()
    chosen, generator = set(choices(graph)), torch.Generator().manual_seed(0)
    for node in graph.nodes:
        is_open = is_random(node) or (node in chosen and _is_open(node, plain, exact, generator))
        if is_open or any(one in found for one in node.all_input_nodes):
            found.add(node)
    return found


def _is_open(node: Node, plain: Mapping[str, Any], exact: Mapping[str, Any], generator: torch.Generator) -> bool:
    call: Any = node.target
    errors = {one: _error(plain[one.name], exact[one.name]) for one in node.all_input_nodes}
    if not any(errors.values()):
        return False

    def chosen(draw: bool) -> list[Tensor]:
        def operand(one: Node) -> Any:
            value = exact[one.name]
            if not draw or not errors[one]:
                return value
            signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
            return value + 4 * errors[one] * signs

        args, kwargs = map_arg((node.args, node.kwargs), operand)
        results = [value for value in tree_leaves(call(*args, **kwargs)) if not value.is_floating_point()]
        return [value.sort(-1).values for value in results] if node.target is aten.topk.default else results

    first = chosen(False)
    return any(not all(map(torch.equal, first, chosen(True))) for _ in range(DRAWS))


def _error(plain: Any, exact: Any) -> float:
    if not isinstance(plain, Tensor) or not plain.is_floating_point() or plain.numel() == 0:
        return 0.0
    return float((plain.to(exact.dtype) - exact).nan_to_num(0, 0, 0).abs().max())
