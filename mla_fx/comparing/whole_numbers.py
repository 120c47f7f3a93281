"""Which whole numbers of a call are sizes, and become smaller as sizes do; the others are numbers of the program.

What multiplies a floating value is a number, also if a size is as large. What is added to positions, or divides them,
is a size: of a page, or of a cache."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.graph.arguments import named_arguments
from mla_fx.graph.torch_private import OpOverload, tree_leaves
from mla_fx.rewriting.draft import Draft, fake_of

Value = Node | Draft

DIMENSIONS = frozenset({"dim", "dims", "dim0", "dim1", "start_dim", "end_dim"})
KERNEL = frozenset({"tile_size"})  # a number that an operator's kernel knows
NO_SIZES = DIMENSIONS | KERNEL
VALUES = ("Tensor", "number", "Optional[Tensor]", "Optional[number]")  # types in schemas
PLACES = (torch.int64, torch.int32, torch.bool)


def numbers_of(call: Value) -> Iterator[float]:
    """The numbers of the program that a call takes."""
    kept = never_sizes(call) - DIMENSIONS
    for name, argument in named_arguments(call):
        for leaf in tree_leaves(argument):
            if type(leaf) is float or (type(leaf) is int and name in kept):
                yield leaf


def never_sizes(call: Value) -> frozenset[str]:
    """The arguments of a call in which a whole number is no size."""
    if not isinstance(call.target, OpOverload):
        return frozenset()
    has_numbers = int in {*map(type, call.args), *map(type, call.kwargs.values())}
    return NO_SIZES | _values(call.target) if has_numbers and _computes_values(call) else NO_SIZES


@functools.cache
def _values(target: OpOverload) -> frozenset[str]:
    """The arguments that are values. Those of arange count its elements."""
    if target._opname == "arange":
        return frozenset()
    return frozenset(each.name for each in target._schema.arguments if str(each.real_type) in VALUES)


def _computes_values(call: Value) -> bool:
    """Whether a call computes with other than places: its operands, or its result if it has none."""
    operands, results = tree_leaves(fake_of([call.args, [*call.kwargs.values()]])), tree_leaves(fake_of(call))
    tensors = _tensors(operands) or _tensors(results)
    return any(tensor.dtype not in PLACES for tensor in tensors)


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
