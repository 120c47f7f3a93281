"""Pages in FRACTAL_NZ, [Blocks, Columns/n0, BlockSize, n0], where n0 elements take 32 bytes."""

from __future__ import annotations

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axis, Dims, Index, axes, fresh
from mla_fx.readings.cache_places import Fractals
from mla_fx.readings.element import Element
from mla_fx.readings.sizes import Size, plain, product, size_of, strides_of
from mla_fx.readings.views import shape_of


def in_nz(node: Node, fractals: Fractals) -> tuple[Element, Dims]:
    """An element of a value, and the axes of its dimensions in the order of FRACTAL_NZ."""
    dims = [fresh(shape_of(node)[dim]) for dim in fractals.dims]
    return Element(node, fractals.index(node, dims)), [axes(part, "the cache", node) for part in dims]


def check_memory(element: Element, dims: Dims) -> None:
    """Raises NoMatch unless the memory of a value is in FRACTAL_NZ, whose dimensions run over the axes `dims`."""
    node, index, _ = element.as_operand
    value = node.meta["val"]
    sizes = [product(axis.size for axis in dim) for dim in dims]
    fractal = 32 // value.dtype.itemsize
    if sizes[3] != fractal:
        has = f"FRACTAL_NZ has {fractal} of {value.dtype}"
        raise NoMatch(f"{sizes[3]} columns of a row lie side by side in the cache; {has}", node)
    for dim, step in list(zip(dims, strides_of(sizes), strict=True))[1:]:
        inner = strides_of([axis.size for axis in dim])
        if any(_step(node, index, axis) != plain(step * each) for axis, each in zip(dim, inner, strict=True)):
            shape = f"[Blocks, Columns/{fractal}, BlockSize, {fractal}]"
            raise NoMatch(f"the cache is not in FRACTAL_NZ, which lies in memory as {shape}", node)


def _step(node: Node, index: tuple[Index, ...], axis: Axis) -> Size:
    """The distance in memory of neighbours along an axis."""
    strides = [size_of(stride) for stride in node.meta["val"].stride()]
    found = (stride * step for part, stride in zip(index, strides, strict=True) for digit, step in part.terms
             if digit.axis is axis)  # fmt: skip
    return plain(sum(found, 0))
