"""Weights in few bits, as far as a message needs them: their products are found, and not read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .calls import args_of, operands_of
from .element import is_parameter
from .sizes import Size
from .views import shape_of

# By name, for what multiplies stored weights differs from one library to the next.
ADDING = frozenset({"addmm", "baddbmm"})
PRODUCTS = ADDING | {"mm", "bmm", "matmul", "linear", "_int_mm", "_scaled_mm", "_weight_int8pack_mm"}
NEAR = 200  # values; tokens that are quantised on their way to a product take some thirty


def quantised_up_projection(value: Node) -> torch.dtype | None:
    """The type in which the weight is stored by which a value is projected up from latents, if that has few bits.

    Latents are narrow, and a product makes them of something wider. Of all products the nearest one counts."""
    up = _nearest_product(value)
    down = None if up is None else _nearest_product(_factors(up)[0])
    if up is None or down is None:
        return None
    wide, narrow, expanded = (_width(node) for node in (_factors(down)[0], _factors(up)[0], up))
    is_up = all(isinstance(size, int) for size in (wide, narrow, expanded)) and wide > narrow < expanded
    return _packed_in(_factors(up)[1]) if is_up else None


def quantised_projection(value: Node) -> torch.dtype | None:
    """The type of the weight in the nearest product that a value is made of, if that has few bits."""
    product = _nearest_product(value)
    return None if product is None else _packed_in(_factors(product)[1])


def _nearest_product(value: Node) -> Node | None:
    return next((node for node in _behind(value) if _is_product(node)), None)


def _packed_in(weight: Node) -> torch.dtype | None:
    """The type of a graph input of 8 bits an element from which a factor is made, if no product lies between."""
    for node in _behind(weight):
        if _is_product(node):
            return None
        dtype = node.meta["val"].dtype if is_parameter(node) else torch.bool
        if dtype.itemsize == 1 and dtype is not torch.bool:
            return dtype
    return None


def _behind(value: Node) -> Iterator[Node]:
    """A value and what it is computed from, the nearest first and not all of it."""
    pending, seen = [value], {value}
    while pending and len(seen) < NEAR:
        node = pending.pop(0)
        yield node
        new = [source for source in operands_of(node) if source not in seen]
        seen.update(new)
        pending += new


def _is_product(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._opname in PRODUCTS


def _factors(product: Node) -> tuple[Node, Node]:
    first = 1 if product.target._opname in ADDING else 0  # type: ignore[union-attr]  # an overload, as all products are
    left, right = args_of(product)[first : first + 2]
    return left, right


def _width(node: Node) -> Size:
    return shape_of(node)[-1]
