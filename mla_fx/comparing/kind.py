"""What a plan does, as a value: equal for plans that do the same to values of the same sizes, as in equal layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from mla_fx.graph.torch_private import has_symbolic_sizes
from mla_fx.rewriting.draft import Change, fake_of, is_value

from .inputs import constant_of
from .region import Region


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
