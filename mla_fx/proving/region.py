"""The part of a graph that a plan stands for: the calls from the values that it reads to those that it replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from mla_fx.rewriting.draft import Draft, fake_of, value_of
from mla_fx.rewriting.replacement import Drafted

from .equations import EQUATIONS, Equation
from .numbers import Numbers

NEAR = 1e-6


@dataclass(frozen=True)
class Region:
    """`leaves` are the values that it reads; `calls` are those of the graph and of the plan, operands first."""

    leaves: tuple[Node, ...]
    calls: tuple[Node | Draft, ...]

    @classmethod
    def of(cls, plan: Drafted) -> Region:
        leaves: list[Node] = []
        calls: dict[Node | Draft, None] = {}
        seen: set[Node | Draft] = set()
        olds = set(plan.olds)

        def visit(part: Node | Draft) -> None:
            if part in seen:
                return
            seen.add(part)
            if isinstance(part, Node) and part not in olds and _is_leaf(part, plan.sources):
                leaves.append(part)
                return
            for operand in part.operands if isinstance(part, Draft) else part.all_input_nodes:
                visit(operand)
            calls[part] = None

        for pair in plan.replaced:
            for part in pair:
                visit(part)
        return cls(tuple(leaves), tuple(calls))

    @property
    def values(self) -> Iterator[Any]:
        """The fake values of everything in it."""
        return map(value_of, (*self.leaves, *self.calls))

    def sizes(self, numbers: Numbers) -> set[int]:
        sizes: set[int] = set()
        _collect(map(numbers.of, self.values), sizes)
        return sizes

    def equations(self, numbers: Numbers) -> Iterator[Equation]:
        for call in self.calls:
            find = EQUATIONS.get(call.target)
            if find is not None:
                yield from find(numbers.of(value_of(call)), *numbers.of(fake_of(call.args)))

    def sizes_in_numbers(self, sizes: Set[int]) -> set[int]:
        """The sizes that numbers of the program may stand for: the 1536 of a mean, the 192 of 1 / sqrt(192)."""
        found: list[Any] = []
        map_aggregate(tuple((call.args, call.kwargs) for call in self.calls), found.append)
        powers = (power for number in found if type(number) in (int, float) and number for power in _powers(number))
        return {size for power in powers for size in sizes if abs(power - size) <= NEAR * size}


def _powers(number: float) -> tuple[float, ...]:
    number = abs(number)
    return number, 1 / number, number**2, number**-2


def _collect(values: Iterable[Any], sizes: set[int]) -> None:
    for value in values:
        if isinstance(value, int):
            sizes.add(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, sizes)


def _is_leaf(node: Node, sources: Set[Node]) -> bool:
    """Whether a value is drawn. Whole numbers are computed from the graph's inputs, because a plan may rest on how they
    depend on each other."""
    if node.op != "call_function":
        return True
    value = node.meta.get("val")
    return node in sources and isinstance(value, Tensor) and value.is_floating_point()
