"""Values of low rank: projected down to a latent, cached or not, and projected up again."""

from __future__ import annotations

import torch

from mla_fx.errors import attempt

from .cache_update import cache_update
from .calls import args_of
from .contraction import Contraction, contraction
from .element import Element, element_of, is_parameter
from .paged import GATHERS
from .rms_norm import rms_norm
from .sizes import Size, product
from .views import RESHAPES

aten = torch.ops.aten

# Operations that show some elements of their first operand, perhaps in a way that no index describes.
SHOWS_ROWS = GATHERS | RESHAPES | {aten.slice.Tensor, aten.select.int}


def row_of(value: Element) -> Element:
    """The new row of the cache that a value is read from, or the value itself, with new axes."""
    update = attempt(cache_update, value.apart()[1])
    return value if update is None else update.row.apart()[1]


def is_low_rank(value: Element) -> bool:
    """Whether the value, or the cached row that it is read from, is projected up from a down-projected value."""
    up = _projection(row_of(value))
    return up is not None and _is_narrow(up) and down_projection(up.left) is not None


def seems_low_rank(value: Element) -> bool:
    """The same without proof, for whatever rows of the latents a view or a table shows."""
    up = _projection(row_of(value))
    if up is None or not _is_narrow(up):
        return False
    latent = up.left
    while latent.origin.target in SHOWS_ROWS:
        latent = element_of(args_of(latent.origin)[0])
    return down_projection(latent) is not None


def is_cached_per_head(value: Element) -> bool:
    """Whether the value is read from a cache whose rows were projected up from latents before, per head."""
    row = row_of(value)
    up = None if row is value else _projection(row)
    return up is not None and len(up.right.axes - set(up.axes)) > 1 and is_low_rank(row)


def is_projected_from(value: Element, latent: Element) -> bool:
    """Whether the value is a projection of a latent, or of the cached row that it is read from."""
    up = _projection(value)
    return up is not None and up.left.origin in (latent.origin, row_of(latent).origin)


def down_projection(latent: Element) -> Contraction | None:
    """The product that computes a latent, or the cached row that it is read from, before any norm."""
    row = row_of(latent)
    norm = attempt(rms_norm, row)
    found = None if norm is None else _projection(norm.value)
    return found or _projection(row)


def rank(found: Contraction) -> Size:
    """The number of terms that are summed."""
    return product(axis.size for axis in found.axes)


def _projection(value: Element) -> Contraction | None:
    """The product that computes a value; if one of its factors is a parameter, that is the right one."""
    found = attempt(contraction, value)
    return found.swapped if found is not None and is_parameter(found.left.origin) else found


def _is_narrow(up: Contraction) -> bool:
    inner, outer = rank(up), product(axis.size for axis in up.right.axes - set(up.axes))
    return isinstance(inner, int) and isinstance(outer, int) and inner < outer
