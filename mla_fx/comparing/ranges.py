"""Numbers at the edges of what parts of a program see: random ones neither saturate a code, nor leave the range of
float16, nor give one key all the weight of an attention.

A part that rounds to codes runs once more on numbers so large that the codes saturate. A part in float16 runs in its
own dtypes, on the largest numbers for which it computes nothing infinite. All are positive, so sums are large as well.
If the plan computes something infinite there, its results must be the same nevertheless. The other dtypes end at 3e38,
which the numbers of a model do not come near. A part with a softmax also runs on numbers so small that all keys are
alike, and on numbers so large that one key has all the weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.torch_private import tree_leaves
from mla_fx.graph.walk import nearest_first
from mla_fx.rewriting.draft import Draft, fake_of, value_of

from .inputs import constant_of
from .interpreter import Interpreter
from .region import Region
from .small_sizes import Value

aten = torch.ops.aten

SATURATING = 10
ALIKE, DOMINATED = -12, 3
LARGEST = 18  # no random number times two to this fits into float16
SOFTMAXES = frozenset({"exp", "exp2", "_softmax", "_safe_softmax"})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Tensor_mode})


@dataclass(frozen=True)
class Edge:
    """The numbers of some leaves times two to a power, from `least` to `most`. `in_own_dtypes`, they are positive."""

    leaves: Set[Node]
    least: int
    most: int
    in_own_dtypes: bool = False

    def run(self, run: Interpreter, power: int) -> Interpreter:
        """What is to run on these numbers in place of those of another run."""
        values: dict[Value, Any] = {leaf: self._large(leaf, run.values[leaf], power) for leaf in run.leaves}
        return Interpreter(run.numbers, run.small, values, None if self.in_own_dtypes else run.coarsest)

    def _large(self, leaf: Value, value: Any, power: int) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        value = value * 2.0**power if leaf in self.leaves else value
        return value.abs().to(value_of(leaf).dtype) if self.in_own_dtypes else value


def edges(region: Region) -> Iterator[Edge]:
    """Few regions have any."""
    drawn = {leaf for leaf in region.leaves if constant_of(leaf) is None}
    if leaves := drawn & _rounded_to_codes(region):
        yield Edge(leaves, SATURATING, SATURATING)
    if any(isinstance(call, Node) and _attends(call.target) for call in region.calls):
        yield from (Edge(drawn, power, power) for power in (ALIKE, DOMINATED))
    if any(_holds(part, lambda dtype: dtype == torch.float16) for part in (*region.leaves, *region.calls)):
        yield Edge(drawn, 0, LARGEST, in_own_dtypes=True)


def _attends(target: Any) -> bool:
    name = getattr(target, "_opname", "")
    return name in SOFTMAXES or "scaled_dot_product" in name


def became_infinite(run: Interpreter, earlier: Interpreter) -> bool:
    """Whether a value is not finite that was so in an earlier run. Masks never are."""
    return any(not _is_finite(value) and _is_finite(earlier.values[part]) for part, value in run.values.items())


def _is_finite(value: Any) -> bool:
    tensors = (part for part in tree_leaves(value) if isinstance(part, Tensor) and part.is_floating_point())
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _rounded_to_codes(region: Region) -> set[Node]:
    """What the program rounds codes from, but not what that is divided by, as a scale is."""
    codes = (call for call in region.calls if _holds(call, lambda dtype: dtype.itemsize == 1 and dtype != torch.bool))
    first = (node for call in codes for node in _numerators(call))
    return {*nearest_first(first, _numerators, region.leaves.__contains__)}.intersection(region.leaves)


def _numerators(call: Value) -> list[Node]:
    """The numbers that a call computes with, but not what it divides by."""
    if isinstance(call, Draft) or call.target is aten.reciprocal.default:
        return []
    operands = call.all_input_nodes[: 1 if call.target in DIVISIONS else None]
    return [one for one in operands if _holds(one, lambda dtype: dtype.is_floating_point and dtype.itemsize > 1)]


def _holds(part: Value, are_such: Callable[[torch.dtype], bool]) -> bool:
    value = fake_of(part)
    return isinstance(value, Tensor) and are_such(value.dtype)
