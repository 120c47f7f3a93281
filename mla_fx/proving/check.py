"""Compares what a plan computes with what it replaces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.torch_private import tree_leaves, unset_fake_temporarily
from mla_fx.rewriting.draft import value_of
from mla_fx.rewriting.replacement import Drafted

from .inputs import TRIES, Inputs
from .interpreter import Interpreter
from .numbers import Numbers
from .region import Region
from .small_sizes import small_sizes

CLOSE = 1e-10  # relative to the largest number of a result
LARGEST = 2**27  # elements of all tensors of a region

Sizes = tuple[Numbers, Mapping[int, int]]


class Difference(NamedTuple):
    """A value for which the plan computes something else."""

    old: Node
    sentence: str


class UncheckedError(Exception):
    """A plan that cannot be run; the message says why."""


def difference(plan: Drafted) -> Difference | None:
    """The first value that the plan computes differently, or None. Raises UncheckedError if that cannot be found out.

    A difference at small sizes may come from a number that is a size, such as the 1536 of a mean. So it counts only if
    it is still there when such sizes, and then all of them, stay as they are."""
    region, found, reason = Region.of(plan), None, ""
    with unset_fake_temporarily(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        for sizes in (_small, _small_but_for_numbers, _own):
            try:
                each = (_difference(plan, region, numbers, small) for numbers, small in sizes(region))
                found = next(filter(None, each), None)
            except UncheckedError as error:
                reason = reason or str(error)
                continue
            if found is None:
                return None
    if found is None:
        raise UncheckedError(reason)
    return found


def _small(region: Region) -> Iterator[Sizes]:
    """Twice, if there are symbols: each time, they have other numbers."""
    numbers = Numbers(region.values, apart=True)
    for first in (5, 7) if numbers.symbols else (5,):
        yield numbers, small_sizes(region.sizes(numbers), region.equations(numbers), first=first)


def _small_but_for_numbers(region: Region) -> Iterator[Sizes]:
    numbers = Numbers(region.values, apart=False)
    sizes = region.sizes(numbers)
    small = small_sizes(sizes, region.equations(numbers), keep=region.sizes_in_numbers(sizes))
    return _affordable(region, numbers, small)


def _own(region: Region) -> Iterator[Sizes]:
    numbers = Numbers(region.values, apart=False)
    return _affordable(region, numbers, {size: size for size in region.sizes(numbers)})


def _affordable(region: Region, numbers: Numbers, small: Mapping[int, int]) -> Iterator[Sizes]:
    tensors = (value for value in tree_leaves(list(region.values)) if isinstance(value, Tensor))
    if sum(math.prod(small[size] for size in numbers.of(value)) for value in tensors) > LARGEST:
        raise UncheckedError("its tensors are too large to be computed")
    yield numbers, small


def _difference(plan: Drafted, region: Region, numbers: Numbers, small: Mapping[int, int]) -> Difference | None:
    run, olds = _run(plan, region, numbers, small)
    for (old, new), before in zip(plan.replaced, olds, strict=True):
        try:
            after = run.run(new)
        except Exception as error:  # an operator may refuse other sizes with any error
            raise UncheckedError(f"the plan does not run: {error}") from error
        sentence = _compared(before, after)
        if sentence is not None:
            return Difference(old, sentence)
    return None


def _run(
    plan: Drafted, region: Region, numbers: Numbers, small: Mapping[int, int]
) -> tuple[Interpreter, list[Tensor]]:
    """The old values for the first inputs that make them finite."""
    coarsest, reason = _coarsest(plan), "its results are not finite"
    for attempt in range(TRIES):
        try:
            inputs = Inputs(numbers, small, attempt)
            run = Interpreter(numbers, small, {leaf: inputs.drawn(leaf) for leaf in region.leaves}, coarsest)
            olds = [run.run(old) for old in plan.olds]
        except Exception as error:  # PyTorch refuses numbers that are out of range, and sizes that do not fit
            reason = f"the program does not run: {error}"
            continue
        if all(bool(torch.isfinite(old).all()) for old in olds):
            return run, olds
    raise UncheckedError(reason)


def _coarsest(plan: Drafted) -> torch.dtype:
    """The dtype that results may be rounded to without further notice; never one of 8 bits."""
    results = tree_leaves([value_of(part) for part in (*plan.olds, *plan.fused)])
    dtypes = {value.dtype for value in results if isinstance(value, Tensor) and value.is_floating_point()}
    return max((dtype for dtype in dtypes if dtype.itemsize > 1), key=step_of, default=torch.float64)


def step_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _compared(before: Tensor, after: Tensor) -> str | None:
    if before.shape != after.shape:
        return f"its shape would be {list(after.shape)} for {list(before.shape)}"
    if before.numel() == 0:
        return None
    errors = (before.double() - after.double()).abs()
    worst = int(errors.argmax())
    if bool(errors.flatten()[worst] <= CLOSE * before.double().abs().max()):
        return None
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst, device="cpu"), before.shape)]
    one, other = before.flatten()[worst].item(), after.flatten()[worst].item()
    return f"at {place} it would be {other:.6g} for {one:.6g}"
