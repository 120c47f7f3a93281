"""The masks of attention scores as the one operand that the operators take."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from .emitter import Emitter
from .layout import Dims, tensor
from .readings.softmax import Mask

aten = torch.ops.aten


def emit_mask(emit: Emitter, masks: Sequence[Mask], dims: Dims) -> Node | None:
    """The masks as one tensor that broadcasts to `dims`: conditions alone as a condition, which is True where a score
    is kept; else numbers to be added. None without masks."""
    conditions = [_kept(emit, mask, dims) for mask in masks if mask.fill is not None]
    numbers = [tensor(emit, mask.element, dims) for mask in masks if mask.fill is None]
    kept = _together(emit, aten.logical_and.default, conditions)
    added = _together(emit, aten.add.Tensor, numbers)
    if kept is None or added is None:
        return added if kept is None else kept
    # a masked score is minus infinity, whatever is added to it
    value = added.meta["val"]
    never = emit.call(aten.full.default, [], -math.inf, dtype=value.dtype, device=value.device)
    return emit.call(aten.where.self, kept, added, never)


def _together(emit: Emitter, combine: object, values: Sequence[Node]) -> Node | None:
    return functools.reduce(lambda left, right: emit.call(combine, left, right), values) if values else None


def _kept(emit: Emitter, mask: Mask, dims: Dims) -> Node:
    condition = tensor(emit, mask.element, dims)
    return condition if mask.keep_where else emit.call(aten.logical_not.default, condition)
