"""Indices: which element of a tensor is read, as arithmetic over axes."""

from mla_fx.readings.axes import (
    Axes,
    Axis,
    Dims,
    Index,
    axes,
    axes_of,
    composite,
    extent,
    fresh,
    leaves,
    of_axis,
    ordered,
    shifted,
    without_digits,
)
from mla_fx.readings.element import resolve
from mla_fx.readings.reading import renamed
from mla_fx.readings.sizes import Size, at_most, product
from mla_fx.readings.views import fresh_index

__all__ = [
    "Axes",
    "Axis",
    "Dims",
    "Index",
    "Size",
    "at_most",
    "axes",
    "axes_of",
    "composite",
    "extent",
    "fresh",
    "fresh_index",
    "leaves",
    "of_axis",
    "ordered",
    "product",
    "renamed",
    "resolve",
    "shifted",
    "without_digits",
]  # fmt: skip
