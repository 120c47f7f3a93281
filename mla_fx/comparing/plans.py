"""Compares what a plan computes with what it replaces, and says which plans are alike, as in equal layers.

Random numbers neither saturate a code, nor leave the range of float16, nor give one key all the weight of an attention.
So parts of a program are also compared at the edges of what they see.

A part that rounds to codes runs once more on numbers so large that the codes saturate. A part in float16 runs in its
own dtypes, on the largest numbers for which it computes nothing infinite. All are positive, so sums are large as well.
If the plan computes something infinite there, its results must be the same nevertheless. The other dtypes end at 3e38,
which the numbers of a model do not come near. A part with a softmax also runs on numbers so small that all keys are
alike, and on numbers so large that one key has all the weight."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.torch_private import has_symbolic_sizes, tree_leaves
from mla_fx.graph.walk import nearest_first
from mla_fx.rewriting.draft import Change, Draft, fake_of, is_value, value_of

from .closeness import apart
from .inputs import TRIES, Inputs, constant_of
from .interpreter import Interpreter, on_real_tensors
from .region import Region, UncheckedError
from .small_sizes import Numbers, Value

CLOSE = 1e-10  # relative to the largest number of a result
AT_EDGES = 1e-3  # the same of large numbers, whose softmax knows few digits
OTHER_CODES = 0.05  # the same, if codes of 8 bits are rounded otherwise
LARGEST = 2**27  # elements of all tensors of a region, and of all that are drawn for it
ENOUGH = 3  # draws that agree, if their places coincide
FIRST, SECOND = 5, 7  # the smallest sizes that are chosen, of two draws
aten = torch.ops.aten

SATURATING = 10
ALIKE, DOMINATED = -12, 3
MOST_DOUBLINGS = 18  # no random number times two to this fits into float16
SOFTMAXES = frozenset({"exp", "exp2", "_softmax", "_safe_softmax"})
DIVISIONS = frozenset({aten.div.Tensor, aten.div.Tensor_mode})


class SmallSizes(NamedTuple):
    """A number for each size, and how often values may be drawn for them."""

    numbers: Numbers
    small: Mapping[int, int]
    tries: int = TRIES


class Difference(NamedTuple):
    """A value of the graph, what the plan replaces it by, how they differ, and the run in which they do."""

    old: Node
    new: Node | Draft
    sentence: str
    run: Interpreter


def difference(plan: Change) -> Difference | None:
    """The first value that the plan changes, or None. Raises UncheckedError if that cannot be found out."""
    with on_real_tensors():
        if _agrees_on_any_numbers(plan):
            return None
        found = _at_some_sizes(plan, Region.of(plan), _small, _small_but_for_numbers, _own)
        if found is None:
            return None
        with contextlib.suppress(UncheckedError):
            found = _at_some_sizes(plan, Region.of(plan, from_common=True), _small, _small_but_for_numbers, _own)
        return found


def _agrees_on_any_numbers(plan: Change) -> bool:
    """Most plans are right whatever they read, which takes the fewest calls to find out."""
    try:
        return _at_some_sizes(plan, Region.of_any_numbers(plan), _small, _small_but_for_numbers) is None
    except UncheckedError:
        return False


def _at_some_sizes(
    plan: Change, region: Region, *choices: Callable[[Region], Iterator[SmallSizes]]
) -> Difference | None:
    """A difference at small sizes may come from a number that is a size, such as the 1536 of a mean. So only one at the
    last choice counts, in which such sizes are what they are. Other calls compute the same of fewer columns as of more
    whose rest is zero."""
    doubt, found, reason = None, None, ""
    for sizes in choices:
        doubt, found = found or doubt, None
        try:
            found = next(filter(None, (_difference(plan, region, each, doubt) for each in sizes(region))), None)
        except UncheckedError as error:
            reason = str(error) if doubt else reason or str(error)
            continue
        if found is None:
            return None
    if found is None:
        raise UncheckedError(f"it differs at small sizes; at its own, {reason}" if doubt else reason)
    return found


# --- sizes -----------------------------------------------------------------------------------------------------------


def _small(region: Region) -> Iterator[SmallSizes]:
    """Two draws if there are symbols."""
    numbers = Numbers(region.values, apart=True)
    for first in (FIRST, SECOND) if numbers.symbols else (FIRST,):
        yield from _affordable(region, numbers, region.small(numbers, first=first))


def _small_but_for_numbers(region: Region) -> Iterator[SmallSizes]:
    numbers = Numbers(region.values, apart=False)
    kept = region.sizes_in_numbers(region.sizes(numbers))
    return _affordable(region, numbers, region.small(numbers, kept))


def _own(region: Region) -> Iterator[SmallSizes]:
    """All, or all but a few that would make tensors too large to be drawn again. A size that is divided by is kept."""
    numbers = Numbers(region.values, apart=False)
    averaged, others = region.averaged(numbers), region.undetermined(numbers)
    others, averaged = others - averaged, averaged | region.shifts()
    small = region.small(numbers, averaged | others)
    while others and _count(region, numbers, small) > LARGEST // TRIES:
        ways = {size: region.small(numbers, averaged | others - {size}) for size in others}
        least = min(others, key=lambda size: _count(region, numbers, ways[size]))
        others, small = others - {least}, ways[least]
    return _affordable(region, numbers, small)


def _affordable(region: Region, numbers: Numbers, small: Mapping[int, int]) -> Iterator[SmallSizes]:
    if any(size < 0 for size in small):  # a difference of symbols, whose numbers are chosen one by one
        raise UncheckedError("a size is negative for the numbers of its symbols")
    count = _count(region, numbers, small)
    if count > LARGEST:
        raise UncheckedError("its tensors are too large to be computed")
    yield SmallSizes(numbers, small, min(TRIES, LARGEST // max(count, 1)))


def _count(region: Region, numbers: Numbers, small: Mapping[int, int]) -> int:
    """Elements of all tensors."""
    tensors = (value for value in tree_leaves(list(region.values)) if isinstance(value, Tensor))
    return sum(math.prod(small[size] for size in numbers.of(value)) for value in tensors)


# --- values ----------------------------------------------------------------------------------------------------------


def _difference(plan: Change, region: Region, sizes: SmallSizes, doubt: Difference | None) -> Difference | None:
    """Compare for the first numbers for which the program runs with finite results; for all if there is a doubt, and
    for some if places coincide. If a difference may come from values that are NaN, as the root of a negative epsilon
    is, more are tried. What a plan names as different may be so for negative factors alone, as the order of two limits
    is."""
    numbers, small, tries = sizes
    compare = functools.partial(apart, close=OTHER_CODES if plan.differs else CLOSE)
    found, agreed, reason = None, list[Interpreter](), ""
    for attempt in range(tries):
        inputs = Inputs(numbers, small, attempt, are_factors_positive=plan.differs)
        run = Interpreter(numbers, small, {leaf: inputs.drawn(leaf) for leaf in region.leaves}, _coarsest(plan))
        try:
            found = _first_difference(plan, run, _finite_results(plan, run), compare)
        except UncheckedError as error:
            reason = str(error)
            continue
        tensors = (value for value in run.values.values() if isinstance(value, Tensor))
        if found is not None and not any(bool(tensor.isnan().any()) for tensor in tensors):
            return found
        agreed += [run] if found is None else []
        if agreed and doubt is None and (inputs.differ or len(agreed) == ENOUGH):
            break
    if agreed:
        return _at_edges(plan, edges(region), agreed[-1])
    if found is None:
        raise UncheckedError(reason)
    return found


def _at_edges(plan: Change, edges: Iterable[Edge], run: Interpreter) -> Difference | None:
    """Where codes saturate, and where the program computes nothing infinite yet, as far as it runs there. On such
    numbers, rounding alone may decide which key a softmax picks, so a difference counts if the plan computes something
    infinite."""
    for edge in edges:
        compare = functools.partial(apart, close=OTHER_CODES if plan.differs or edge.in_own_dtypes else AT_EDGES)
        with contextlib.suppress(UncheckedError):
            largest, olds = _at_edge(plan, edge, run)
            found = _first_difference(plan, largest, olds, compare)
            if found is not None and (became_infinite(largest, run) or not edge.in_own_dtypes):
                return found
    return None


def _at_edge(plan: Change, edge: Edge, run: Interpreter) -> tuple[Interpreter, list[list[Tensor]]]:
    """The run on the largest numbers for which the program computes nothing infinite, and its results."""
    least, most, found = edge.least, edge.most, None
    while least <= most:
        power = (least + most + 1) // 2
        larger = edge.run(run, power)
        with contextlib.suppress(UncheckedError):
            olds = _finite_results(plan, larger)
            if not became_infinite(larger, run):
                found, least = (larger, olds), power + 1
                continue
        most = power - 1
    if found is None:
        raise UncheckedError("its results are not finite")
    return found


def _finite_results(plan: Change, run: Interpreter) -> list[list[Tensor]]:
    """Return the results of each value that the plan replaces. Raises UncheckedError if one is not finite."""
    try:
        olds = [tree_leaves(run.run(old)) for old in plan.olds]
    except Exception as error:  # PyTorch refuses numbers that are out of range, and sizes that do not fit
        raise UncheckedError(f"the program does not run: {error}") from error
    if not all(bool(torch.isfinite(result).all()) for results in olds for result in results):
        raise UncheckedError("its results are not finite")
    return olds


def _first_difference(
    plan: Change, run: Interpreter, olds: list[list[Tensor]], compare: Callable[[Tensor, Tensor], str | None]
) -> Difference | None:
    for (old, new), before in zip(plan.replacements, olds, strict=True):
        try:
            after = tree_leaves(run.run(new))
        except Exception as error:  # an operator may refuse other sizes with any error
            raise UncheckedError(f"the plan does not run: {error}") from error
        for sentence in filter(None, map(compare, before, after)):
            return Difference(old, new, sentence, run)
    return None


def _coarsest(plan: Change) -> torch.dtype:
    """The dtype that the operators' contract lets everything be rounded to; never one of 8 bits."""
    results: list[Node | Draft] = [*plan.olds, *plan.fused]
    tensors = [value for value in tree_leaves(list(map(value_of, results))) if isinstance(value, Tensor)]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point() and tensor.itemsize > 1}
    dtypes |= {value for call in plan.fused for value in call.kwargs.values() if isinstance(value, torch.dtype)}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def kind_of(plan: Change) -> Hashable:
    """Raises UncheckedError if it has too many calls."""
    region = Region.of_any_numbers(plan)
    numbers = {part: number for number, part in enumerate((*region.leaves, *region.calls))}

    def named(value: Any) -> Hashable:
        if is_value(value):
            return numbers[value]
        if isinstance(value, (list, tuple)):
            return tuple([named(part) for part in value])
        return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, slice)) else (type(value), value)

    leaves = tuple([(str(constant_of(leaf)), _described(fake_of(leaf))) for leaf in region.leaves])
    calls = tuple([(call.target, named(call.args), named([*call.kwargs.items()])) for call in region.calls])
    return leaves, calls, named(plan.replacements), plan.differs


def _described(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return str(value)
    sizes, strides = value.shape, value.stride()
    return value.dtype, *((str(sizes), str(strides)) if has_symbolic_sizes(value) else (sizes, strides))


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
        yield Edge(drawn, 0, MOST_DOUBLINGS, in_own_dtypes=True)


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
