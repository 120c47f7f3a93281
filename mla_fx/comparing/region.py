"""The part of a graph that a plan replaces: the calls from the values that it reads to those that it replaces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.schemas import named_arguments
from mla_fx.graph.torch_private import tree_leaves
from mla_fx.graph.walk import FEW, few_behind
from mla_fx.rewriting.draft import Change, Draft, fake_of, value_of

from .inputs import INTEGER_CODES
from .small_sizes import EQUATIONS, KERNEL, SMALL, Equation, Numbers, Shape, numbers_of, of_bytes, small_sizes, times

aten = torch.ops.aten

NEAR = 1e-6
LARGEST = 1e9  # size
MOST = 1000  # calls of a region
WHOLE = (torch.int64, torch.int32)
# Operators of others are not run: a collective would wait for other processes.
PURE = ("aten", "prims", "mla_fx", "quantized_decomposed")
ROUNDS = frozenset({aten.round.default, aten.trunc.default, aten.floor.default})
SHIFTS = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})
AVERAGES = frozenset({"mean", "std", "var", "var_mean"})
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})


class UncheckedError(Exception):
    """A plan that cannot be compared; the message says why."""


@dataclass(frozen=True)
class Region:
    """`leaves` are the values that it reads; `calls` are those of the graph and of the plan, operands first."""

    leaves: tuple[Node, ...]
    calls: tuple[Node | Draft, ...]

    @classmethod
    def of_any_numbers(cls, plan: Change) -> Region:
        """All numbers that a plan reads are drawn."""
        return cls._behind(plan, {origin for source in plan.sources for origin in _origins(source)})

    @classmethod
    def of(cls, plan: Change, *, from_common: bool = False) -> Region:
        """Numbers that a plan reads are drawn, but not those that depend on other drawn ones, as scales depend on their
        tokens, or on the graph's inputs, as rotary tables that are looked up twice. With `from_common`, a value behind
        two others, as tokens that are reshaped twice, is drawn in place of these. Raises UncheckedError if too many
        calls are behind the others."""
        sources = {origin for source in plan.sources for origin in _origins(source)}
        while True:
            region = cls._behind(plan, sources)
            inside = {*region.leaves, *region.calls}
            leaves = {leaf for leaf in region.leaves if leaf.op == "call_function"}
            dependent = {leaf for leaf in leaves if len(few_behind(leaf, inside)) < FEW}
            if from_common and not dependent and (common := _common(leaves)):
                sources.add(common)
                dependent = {leaf for leaf in leaves - {common} if common in few_behind(leaf)}
            if not dependent:
                return region
            sources -= dependent

    @classmethod
    def _behind(cls, plan: Change, sources: Set[Node]) -> Region:
        leaves: list[Node] = []
        calls: dict[Node | Draft, None] = {}
        seen: set[Node | Draft] = set()
        olds = set(plan.olds)

        def visit(parts: Iterable[Node | Draft]) -> None:
            for part in parts:
                if part in seen:
                    continue
                seen.add(part)
                if isinstance(part, Draft):
                    visit(part.operands)
                elif part.op != "call_function" or (part in sources and part not in olds):
                    leaves.append(part)
                    continue
                else:
                    visit(part.all_input_nodes)
                calls[part] = None
                if len(calls) > MOST:
                    raise UncheckedError(f"more than {MOST} calls are behind what it reads")

        for pair in plan.replacements:
            visit(pair)
        return cls(tuple(leaves), tuple(calls))

    @property
    def values(self) -> Iterator[Any]:
        return map(fake_of, (*self.leaves, *self.calls))

    def sizes(self, numbers: Numbers) -> set[int]:
        sizes: set[int] = set()
        _collect(map(numbers.of, self.values), sizes)
        return sizes

    def small(self, numbers: Numbers, keep: Collection[int] = (), first: int = SMALL + 1) -> Mapping[int, int]:
        """A small number for each size; see small_sizes. Those that a kernel knows stay as they are."""
        known: set[Any] = {number for call in self.calls for name, number in call.kwargs.items() if name in KERNEL}
        equations, places = self.equations(numbers), self.places(numbers)
        return small_sizes(self.sizes(numbers), equations, places, known.union(keep), first, self.shifts())

    def places(self, numbers: Numbers) -> list[Shape]:
        """The shapes of whole numbers that are drawn."""
        values = [value for leaf in self.leaves if isinstance(value := value_of(leaf), Tensor)]
        return [numbers.of(value) for value in values if value.dtype in WHOLE]

    def shifts(self) -> set[int]:
        """The numbers that are added to positions and slots, or subtracted from them."""
        added = (call.args[1] for call in self.calls if call.target in SHIFTS and value_of(call).dtype in WHOLE)
        return {abs(number) for number in added if type(number) is int}

    def equations(self, numbers: Numbers) -> Iterator[Equation]:
        yield from self._of_bytes(numbers)
        for call in self.calls:
            find = EQUATIONS.get(call.target)
            if find is not None:
                yield from find(numbers.of(value_of(call)), *numbers.of(fake_of(call.args)))

    def _of_bytes(self, numbers: Numbers) -> Iterator[Equation]:
        """What views of bytes as wider numbers ask: the pieces of a row beside them end where numbers may begin."""
        found, widths, beside = list[Equation](), [1], set[int]()
        for call in self.calls:
            if call.target is not aten.view.dtype:
                continue
            old, new = fake_of(call.args[0]), value_of(call)
            found += of_bytes(numbers.of(old), numbers.of(new), _width(old) / _width(new))
            widths.append(_width(new) // _width(old))
            beside.update(size for cut in _cuts(call.args[0]) for size in numbers.of(cut.args[1]))
        yield from found
        width = max(widths)
        free = beside - {each.whole for each in found}
        yield from (times(width, size, size // width) for size in free if width > 1 and size % width == 0)

    def undetermined(self, numbers: Numbers) -> set[int]:
        """The sizes whose sums and products the others are."""
        equations = list(self.equations(numbers))
        wholes = {each.whole for each in equations if each.whole not in each.parts}
        return self.sizes(numbers).union(*(each.parts for each in equations)) - wholes

    def averaged(self, numbers: Numbers) -> set[int]:
        """The sizes that a result is divided by, in a mean or a norm."""
        shapes = [shape for call in self.calls for shape in _averaged(call, numbers)]
        return {size for shape in shapes for size in shape}

    def sizes_in_numbers(self, sizes: Set[int]) -> set[int]:
        """The sizes that numbers of the program may be: the 1536 of a mean, the 192 of 1 / sqrt(192)."""
        numbers = (abs(number) for call in self.calls for number in numbers_of(call))
        likely = [number for number in numbers if 1 / LARGEST <= number <= LARGEST]
        powers = (power for number in likely for power in (number, 1 / number, number**2, number**-2))
        return {size for power in powers for size in sizes if abs(power - size) <= NEAR * size}


def _cuts(value: Any) -> Iterator[Any]:
    """The calls that cut a row into pieces, where this is one or a part of one."""
    while isinstance(value, Node) and value.all_input_nodes:
        if value.target is aten.split_with_sizes.default:
            yield value
        value = value.args[0]


def _width(tensor: Tensor) -> int:
    """In bytes; those of numbers are read in float32."""
    return 4 if tensor.is_floating_point() else tensor.itemsize


def _averaged(call: Node | Draft, numbers: Numbers) -> Iterator[Iterable[int]]:
    if getattr(call.target, "_opname", "") in AVERAGES:
        yield set(numbers.of(fake_of(call.args[0]))).difference(*numbers.of(tree_leaves(value_of(call))))
    for name, argument in named_arguments(call):
        sizes = numbers.of(fake_of(argument))
        if ("gamma" in name or name == "normalized_shape") and isinstance(sizes, (tuple, list)):
            yield sizes


def _collect(values: Iterable[Any], sizes: set[int]) -> None:
    for value in values:
        if isinstance(value, tuple):  # a shape
            sizes.update(value)
        elif isinstance(value, list):
            _collect(value, sizes)
        elif isinstance(value, int):
            sizes.add(value)


def _origins(source: Node) -> Iterable[Node]:
    """The values that are drawn for one that a plan reads: itself, or what codes are rounded from, if that runs. None
    for other whole numbers: these are computed from the graph's inputs, because a plan may rest on how they depend on
    each other."""
    value = source.meta.get("val")
    if source.op != "call_function" or not isinstance(value, Tensor):
        return ()
    node, is_rounded = source, value.dtype in INTEGER_CODES
    for _ in range(FEW):
        operands = _tensors(node)
        is_rounded |= node.target in ROUNDS
        if len(operands) != 1:
            break
        (node,) = operands
    if is_rounded:
        return (source,) if _is_of_others(node) else map(_uncast, _tensors(node))
    return (source,) if value.is_floating_point() else ()


def _is_of_others(result: Node) -> bool:
    return any(getattr(call.target, "namespace", PURE[0]) not in PURE for call in result.all_input_nodes)


def _tensors(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), Tensor)]


def _uncast(node: Node) -> Node:
    while node.target in CASTS and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _common(nodes: Iterable[Node]) -> Node | None:
    """A value that is a few calls behind two others."""
    seen: set[Node] = set()
    for node in nodes:
        behind = {node, *few_behind(node)}
        if not seen.isdisjoint(behind):
            return max(seen & behind)
        seen |= behind
    return None
