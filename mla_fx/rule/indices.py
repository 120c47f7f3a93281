"""Indices: which element of a tensor is read, as arithmetic over axes."""

from __future__ import annotations

from mla_fx.readings.axes import Axis, Dims, Index, axes_of, composite, cuts, extent, fresh, of_axis, shifted
from mla_fx.readings.element import resolve
from mla_fx.readings.reading import renamed
from mla_fx.readings.sizes import Size, at_most, product
from mla_fx.readings.views import fresh_index

__all__ = [
    "Axis", "Dims", "Index", "Size", "at_most", "axes_of", "composite", "cuts", "extent", "fresh", "fresh_index",
    "of_axis", "product", "renamed", "resolve", "shifted",
]  # fmt: skip
