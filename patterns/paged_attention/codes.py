"""What paged_attention takes beside codes: a scale and an offset for each channel, and the dtype of the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mla_fx.rule import NoMatch
from mla_fx.rule.operands import Expression, tensor
from mla_fx.rule.readings import Axes, Dequantised, Element, is_coarser

CacheCodes = Sequence[Dequantised | None]  # of keys and of values; None if a cache holds no codes


def channels(found: CacheCodes, dims: Sequence[tuple[Axes, Axes]], dtype: torch.dtype) -> list[Expression | None]:
    """The scales, and then the offsets, of keys and of values; none if no cache holds codes."""
    if not any(found):
        return []
    return [
        None if one is None else _channel(getattr(one, part), part, own, dtype)
        for part in ("scale", "offset")
        for one, own in zip(found, dims, strict=True)
    ]


def _channel(part: Element | None, what: str, dims: tuple[Axes, Axes], dtype: torch.dtype) -> Expression | None:
    """Return the part as it is stored, or in `dtype` if the program rounds it so far."""
    if part is None:
        return None
    if not part.axes <= {axis for dim in dims for axis in dim}:
        takes = "paged_attention takes one for each channel of a key head"
        raise NoMatch(f"the {what} of codes is not the same for all tokens and query heads; {takes}", part.origin)
    stored = part.stored
    is_exact = is_coarser(dtype, stored.dtype) and stored.is_exact_in(dtype)
    return tensor(stored, dims, dtype=dtype if is_exact else stored.dtype, expand=True)


def rounding(found: CacheCodes, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The option that rounds numbers where the operator, in `dtype`, would not."""
    dtypes = {one.dtype: one.node for one in found if one is not None}
    if len(dtypes) > 1:
        first, second = dtypes
        raise NoMatch(f"keys are dequantised in {first} and values in {second}", dtypes[second])
    coarser = [one for one in dtypes if is_coarser(one, dtype)]
    return {"dequant_dtype": coarser[0]} if coarser else {}
