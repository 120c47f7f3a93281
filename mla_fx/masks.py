"""The additive terms of attention scores as one mask."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from .canonical.softmax import Mask
from .rewrite import Dims, Emitter

aten = torch.ops.aten


def emit_mask(emit: Emitter, masks: Iterable[Mask], dims: Dims) -> Node | None:
    """The masks added up, as a tensor that broadcasts to `dims`; None without masks."""
    total: Node | None = None
    for mask in masks:
        term = _one(emit, mask, dims)
        total = term if total is None else emit.call(aten.add.Tensor, total, term)
    return total


def _one(emit: Emitter, mask: Mask, dims: Dims) -> Node:
    term = emit.tensor(mask.element, dims)
    if mask.fill is None:
        return term
    device = term.meta["val"].device
    kept = emit.call(aten.full.default, [], 0.0, dtype=torch.float32, device=device)
    filled = emit.call(aten.full.default, [], mask.fill, dtype=torch.float32, device=device)
    chosen, other = (kept, filled) if mask.keep_where else (filled, kept)
    return emit.call(aten.where.self, term, chosen, other)
