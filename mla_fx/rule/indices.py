"""Indices: which element of a tensor is read, as arithmetic over axes."""

from mla_fx.readings.axes import Axes as Axes
from mla_fx.readings.axes import Axis as Axis
from mla_fx.readings.axes import Dims as Dims
from mla_fx.readings.axes import Index as Index
from mla_fx.readings.axes import axes as axes
from mla_fx.readings.axes import axes_of as axes_of
from mla_fx.readings.axes import composite as composite
from mla_fx.readings.axes import extent as extent
from mla_fx.readings.axes import fresh as fresh
from mla_fx.readings.axes import leaves as leaves
from mla_fx.readings.axes import of_axis as of_axis
from mla_fx.readings.axes import ordered as ordered
from mla_fx.readings.axes import shifted as shifted
from mla_fx.readings.axes import without_digits as without_digits
from mla_fx.readings.element import resolve as resolve
from mla_fx.readings.reading import renamed as renamed
from mla_fx.readings.sizes import Size as Size
from mla_fx.readings.sizes import at_most as at_most
from mla_fx.readings.sizes import product as product
from mla_fx.readings.views import fresh_index as fresh_index
