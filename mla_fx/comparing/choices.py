"""What rounding may decide: codes, the best experts, a token, a comparison.

Two runs of one program that round differently may choose differently, and both are right. So a compiled graph is first
compared with exact numbers for the choices of the original graph (`Choosing`). A result that differs may depend on
another choice that is as good. Runs in which choices see values moved within their errors (`Nearby`) show how far such
choices carry it, row by row, and a result that is further away is wrong."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from mla_fx.graph.schemas import named_arguments
from mla_fx.graph.torch_private import OpOverload, tree_leaves

from .exact import BYTES, FLOATS, Wide, widened
from .inputs import INTEGER_CODES

DRAWS = 64  # with 16, verify refused 10 of 750 right results with 2 to 16 open choices in a row; with 64, none
TIMES = 4  # the error of what a choice sees, in a draw: another run was off by at most 3.3 times, in 750 draws
ULPS = 64  # of the largest number: the error of a value in a wide dtype
STEPS = frozenset({"round", "floor", "ceil", "trunc", "sign", "floor_divide", "remainder", "fmod"})  # to whole numbers


def choices(graph: Graph) -> list[Node]:
    """Calls whose results jump: whole numbers, flags and codes of floating values."""
    calls = (node for node in graph.nodes if isinstance(node.target, OpOverload))
    found = [node for node in calls if _is_choice(node)]
    return [node for node in found if not any(isinstance(value, float) and math.isinf(value) for value in node.args)]


def _is_choice(node: Node) -> bool:
    results = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    operands = (one.meta.get("val") for one in node.all_input_nodes)
    is_made_of_floats = any(isinstance(value, Tensor) and _is_wide(value) for value in operands)
    is_step = getattr(node.target, "_opname", "") in STEPS or bool(node.kwargs.get("rounding_mode"))
    return is_made_of_floats and (is_step or not all(map(_is_wide, results)))


def _is_wide(value: Tensor) -> bool:
    """Whether numbers are widened: codes are not."""
    return value.dtype in (*FLOATS, torch.float64) or value.is_complex()


def seen_by(chosen: Collection[Node]) -> set[str]:
    """The names of what choices depend on, and their own."""
    return {one.name for node in chosen for one in (node, *node.all_input_nodes)}


def depends_on(graph: Graph, is_source: Callable[[Node], bool]) -> set[Node]:
    """The calls of some kind, and all that is computed from them."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_source(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def of_bytes(graph: Graph) -> set[Node]:
    """What may hold the bytes of floating numbers, whose last bits mean nothing."""
    return depends_on(graph, lambda node: node.target in BYTES and _is_choice(node))


class Choosing(Wide):
    """Runs a graph in a wide dtype, with choices that another run has made."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype, chosen: Mapping[str, Any]) -> None:
        found = choices(gm.graph)
        super().__init__(gm, dtype, seen_by(found))
        self.chosen = {node: chosen[node.name] for node in found}

    def _of(self, node: Node) -> Any:
        if node not in self.chosen:
            return super()._of(node)
        return _picked(node, self.env, widened(self.dtype, self.chosen[node]))


class Nearby(Wide):
    """Runs a graph in a wide dtype, with choices among values that are moved at random within their errors, which are
    given by the names of the values. A number that is rounded moves by a step at most, a code stays in its range, and
    zeros do not move."""

    def __init__(
        self, gm: GraphModule, dtype: torch.dtype, errors: Mapping[str, float], generator: torch.Generator
    ) -> None:
        super().__init__(gm, dtype)
        self.chosen, self.errors, self.generator = {*choices(gm.graph)}, errors, generator

    def _of(self, node: Node) -> Any:
        if node not in self.chosen:
            return super()._of(node)
        most = math.inf if isinstance(node.meta["val"], (tuple, list)) else 1.0
        own = {one: self.env[one] for one in node.all_input_nodes}
        moved = {one: self._moved(value, self.errors.get(one.name, 0.0), most) for one, value in own.items()}
        self.env.update({one: _in_range(node, value) for one, value in moved.items()})
        value = super()._of(node)
        self.env.update(own)
        return _picked(node, self.env, value)

    def _moved(self, value: Any, error: float, most: float) -> Any:
        if not error:
            return value
        signs = torch.randint(0, 2, value.shape, generator=self.generator).to(value) * 2 - 1
        return value + min(TIMES * error, most) * signs * (value != 0)


def _in_range(node: Node, value: Any) -> Any:
    """What a cast gets: beyond the range of its codes, numbers would wrap around."""
    result = node.meta["val"]
    if not isinstance(result, Tensor) or result.dtype not in INTEGER_CODES or not torch.is_floating_point(value):
        return value
    bounds = torch.iinfo(result.dtype)
    return value.clamp(bounds.min, bounds.max)


def _picked(node: Node, env: Mapping[Node, Any], chosen: Any) -> Any:
    """What a choice returns: where it returns numbers with their places, those of the operand at these places."""
    dim = dict(named_arguments(node)).get("dim")
    if not isinstance(chosen, (tuple, list)) or len(chosen) != 2 or dim is None:
        return chosen
    operand, places = env[node.all_input_nodes[0]], chosen[1]
    if places.ndim == operand.ndim:
        return [operand.gather(dim, places), places]
    return [operand.gather(dim, places.unsqueeze(dim)).squeeze(dim), places]


def errors(plain: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    """The largest error of each value."""
    return {name: _largest(plain[name].to(value.dtype) - value) for name, value in _floats(exact)}


def rounding_of(exact: Mapping[str, Any]) -> dict[str, float]:
    """The same for values that are computed in this wide dtype, in which hardly more than ties are open."""
    return {name: ULPS * torch.finfo(value.dtype).eps * _largest(value) for name, value in _floats(exact)}


def _floats(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in values.items() if isinstance(value, Tensor) and _is_wide(value))


def _largest(value: Tensor) -> float:
    return float(value.nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0


def nearby(gm: GraphModule, dtype: torch.dtype, errors: Mapping[str, float]) -> Iterator[Nearby]:
    """Runs with other choices that are as good."""
    generator = torch.Generator().manual_seed(0)
    return (Nearby(gm, dtype, errors, generator) for _ in range(DRAWS))
