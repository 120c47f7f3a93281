"""The masks of attention scores as the operands that the operators take."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch

from mla_fx.errors import NoMatch
from mla_fx.readings.attention import Attention, Mask
from mla_fx.readings.causal import CausalByPosition, causal_by_position
from mla_fx.readings.element import Element, is_coarser
from mla_fx.readings.sizes import Size, plain, product

from .materialize import Axes, Dims, axes, tensor
from .plan import Call, Cast, Expression

aten = torch.ops.aten


def check_is_causal(found: Attention, s: Axes) -> None:
    """Raises NoMatch unless `is_causal`, where it is given, counts the tokens of each sequence, and says all."""
    if found.causal is not None and found.masks:
        raise NoMatch("is_causal is given together with a mask", found.node)
    if found.causal is not None and axes(found.causal.rows, "the query", found.node) != s:
        raise NoMatch("is_causal counts the tokens of several sequences or heads as one sequence", found.node)


def known_causal(found: Attention, b: Axes, s: Axes, dtype: torch.dtype) -> CausalByPosition | None:
    """How many keys each row sees, where that is all that the masks say; None where that is not known, or the masks are
    rounded coarser than `dtype`, in which the operator computes."""
    try:
        for mask in found.masks:
            _check_type(mask, dtype)
        return causal_by_position(found, b, s)
    except NoMatch:
        return None


def counts_from_first(causal: CausalByPosition, s: Axes) -> bool:
    """Whether row s sees keys t <= s and no others, which is what `is_causal` says. Each row so sees a key, beside
    which no score is left of those that are filled: with the lowest number of a type, as they are known."""
    if isinstance(causal.position, Element):
        return False
    return plain(causal.position + causal.more - product(axis.size for axis in s)) == 0


def mask_operands(
    found: Attention, causal: CausalByPosition | None, dims: tuple[Axes, Axes, Axes, Axes]
) -> tuple[Expression | None, Expression | None, float | None]:
    """A mask that broadcasts to `dims`, which are those of sequences, heads, tokens and keys, or None and lengths that
    say the same, where the masks are known to be causal; and with what scores are filled where they are hidden, None
    for minus infinity."""
    if causal is not None:
        with contextlib.suppress(NoMatch):  # the mask may be any: only as lengths it is one of these
            return None, _context_lens(found, causal, dims[0]), causal.fill
    return joined_masks(found.masks, dims), None, found.fill


def _context_lens(found: Attention, causal: CausalByPosition, b: Axes) -> Expression:
    """How many keys the last row of each sequence sees, int64 [B] or [1]."""
    device = found.node.meta["val"].device
    if not isinstance(causal.position, Element):
        return lengths(causal.position + causal.more, device)
    own = causal.position.origin.meta["val"].device
    if own != device:
        raise NoMatch(f"the positions are on {own}, the attention is on {device}", causal.position.origin)
    positions = Cast(tensor(causal.position, (b,)), torch.int64)
    return positions if causal.more == 0 else Call(aten.add.Tensor, positions, causal.more)


def lengths(length: Size, device: torch.device) -> Expression:
    """One length for all sequences, int64 [1]."""
    return Call(aten.full.default, [1], length, dtype=torch.int64, device=device)


def _check_type(mask: Mask, dtype: torch.dtype) -> None:
    """Numbers that are added are no operand any more, so that what they are rounded to counts as the program's."""
    dtypes = (mask.element.origin.meta["val"].dtype, *mask.element.roundings)
    if mask.fill is None and any(is_coarser(own, dtype) for own in dtypes):
        raise NoMatch(f"the mask is in {dtypes[0]}, the operator computes in {dtype}", mask.node)


def joined_masks(masks: Sequence[Mask], dims: Dims) -> Expression | None:
    """The masks as one tensor that broadcasts to `dims`: conditions alone as a condition, which is True where a score
    is kept; else numbers to be added. None without masks."""
    numbers = [mask.element for mask in masks if mask.fill is None]
    visible = _together(aten.logical_and.default, [_visible(mask, dims) for mask in masks if mask.fill is not None])
    added = _together(aten.add.Tensor, [tensor(element, dims) for element in numbers])
    if visible is None or added is None:
        return added if visible is None else visible
    # a masked score is minus infinity, whatever is added to it
    dtype = functools.reduce(torch.promote_types, (element.dtype for element in numbers))
    device = numbers[0].origin.meta["val"].device
    return Call(aten.where.self, visible, added, Call(aten.full.default, [], -math.inf, dtype=dtype, device=device))


def _together(combine: object, values: Sequence[Expression]) -> Expression | None:
    return functools.reduce(lambda *both: Call(combine, *both), values) if values else None


def _visible(mask: Mask, dims: Dims) -> Expression:
    condition = tensor(mask.element, dims)
    return condition if mask.keep_where else Call(aten.logical_not.default, condition)
