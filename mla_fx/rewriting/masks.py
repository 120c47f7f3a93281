"""Turns the masks of attention scores into operands of the fused operators."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch

from mla_fx.errors import NoMatch
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Axes, Dims, axes
from mla_fx.readings.causal import CausalByPosition, causal_by_position
from mla_fx.readings.element import Element, is_coarser
from mla_fx.readings.logits import Mask, Masked, fill_of
from mla_fx.readings.sizes import Size, plain, product

from .materialize import tensor
from .plan import Call, Cast, Expression

aten = torch.ops.aten


def check_is_causal(found: Attention, s: Axes) -> None:
    """Raises NoMatch unless `is_causal`, if given, counts the tokens of each sequence, and no other mask is present."""
    if found.causal is not None and found.masks:
        raise NoMatch("is_causal is given together with a mask", found.node)
    if found.causal is not None and axes(found.causal.rows, "the query", found.node) != s:
        raise NoMatch("is_causal counts the tokens of several sequences or heads as one sequence", found.node)


def known_causal(found: Masked, b: Axes, s: Axes, dtype: torch.dtype) -> CausalByPosition | None:
    """The number of keys that each row sees, if this describes the masks completely.

    None if this is not known, or if the masks are rounded coarser than `dtype`, in which the operator computes."""
    try:
        for mask in found.masks:
            _check_type(mask, dtype)
        return causal_by_position(found, b, s)
    except NoMatch:
        return None


def counts_from_first(causal: CausalByPosition, s: Axes) -> bool:
    """Whether row s sees exactly the keys t <= s, as `is_causal` means.

    Each row then sees at least one key. Next to it the hidden scores vanish, because the fill of a known causal mask is
    minus infinity or the lowest number of a dtype."""
    if isinstance(causal.position, Element):
        return False
    return plain(causal.position + causal.more - product(axis.size for axis in s)) == 0


def mask_operands(
    found: Masked, causal: CausalByPosition | None, dims: tuple[Axes, Axes, Axes, Axes]
) -> tuple[Expression | None, Expression | None, float | None]:
    """The mask, the context lengths and the fill of hidden scores. At most one of mask and lengths is not None.

    If the masks are known to be causal, they are given as lengths. Otherwise the mask broadcasts to `dims`, the axes of
    sequences, heads, tokens and keys. A fill of None is minus infinity."""
    if causal is not None:
        with contextlib.suppress(NoMatch):  # any mask can still be passed as a tensor
            return None, _context_lens(found, causal, dims[0]), causal.fill
    return joined_masks(found.masks, dims), None, fill_of(found.masks)


def mask_and_lengths(
    found: Masked, dims: tuple[Axes, Axes, Axes, Axes], dtype: torch.dtype
) -> tuple[Expression | None, Expression | None]:
    """The same where hidden scores are minus infinity, for an operator that computes in `dtype`."""
    causal = known_causal(found, dims[0], dims[2], dtype)
    mask, lengths, _ = mask_operands(found, None if causal is None or causal.fill is not None else causal, dims)
    return mask, lengths


def _context_lens(found: Masked, causal: CausalByPosition, b: Axes) -> Expression:
    """The number of keys that the last row of each sequence sees, int64 [B] or [1]."""
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
    """Raises NoMatch if an additive mask is rounded coarser than `dtype`.

    Known as lengths, the added numbers are no longer an operand, so their rounding counts as the program's."""
    dtypes = (mask.element.origin.meta["val"].dtype, *mask.element.roundings)
    if mask.fill is None and any(is_coarser(own, dtype) for own in dtypes):
        raise NoMatch(f"the mask is in {dtypes[0]}, the operator computes in {dtype}", mask.node)


def joined_masks(masks: Sequence[Mask], dims: Dims) -> Expression | None:
    """The masks as one tensor that broadcasts to `dims`, or None without masks.

    If all masks are conditions, it is a condition that is True where a score is kept. Otherwise it is additive."""
    numbers = [mask.element for mask in masks if mask.fill is None]
    visible = _together(aten.logical_and.default, [_visible(mask, dims) for mask in masks if mask.fill is not None])
    added = _together(aten.add.Tensor, [tensor(element, dims) for element in numbers])
    if visible is None or added is None:
        return added if visible is None else visible
    # a masked score is minus infinity, regardless of what is added to it
    dtype = functools.reduce(torch.promote_types, (element.dtype for element in numbers))
    device = numbers[0].origin.meta["val"].device
    return Call(aten.where.self, visible, added, Call(aten.full.default, [], -math.inf, dtype=dtype, device=device))


def _together(combine: object, values: Sequence[Expression]) -> Expression | None:
    return functools.reduce(lambda *both: Call(combine, *both), values) if values else None


def _visible(mask: Mask, dims: Dims) -> Expression:
    condition = tensor(mask.element, dims)
    return condition if mask.keep_where else Call(aten.logical_not.default, condition)
