"""Quantised weights, for messages only: their products are found but not read."""

from __future__ import annotations

import itertools

import torch
from torch.fx import Node

from mla_fx.graph.torch_private import OpOverload

from .calls import args_of
from .element import computed_from, has_8_bits, is_parameter
from .views import shape_of

# By name, because the operators that multiply stored weights differ between libraries.
ADDING = frozenset({"addmm", "baddbmm"})
PRODUCTS = ADDING | {"mm", "bmm", "matmul", "linear", "_int_mm", "_scaled_mm", "_weight_int8pack_mm"}
NEAR = 200  # values; tokens that are quantised before a product take about thirty


def quantised_up_projection(value: Node) -> torch.dtype | None:
    """The dtype of the stored weight by which a value is projected up from latents, if that is quantised.

    Latents are narrow, and a product computes them from something wider. The nearest product counts."""
    up = _nearest_product(value)
    down = None if up is None else _nearest_product(_factors(up)[0])
    if up is None or down is None:
        return None
    wide, narrow, expanded = (shape_of(node)[-1] for node in (_factors(down)[0], _factors(up)[0], up))
    is_up = all(isinstance(size, int) for size in (wide, narrow, expanded)) and wide > narrow < expanded
    return _packed_in(_factors(up)[1]) if is_up else None


def quantised_projection(value: Node) -> torch.dtype | None:
    """The dtype of the weight in the nearest product that computes a value, if that is quantised."""
    product = _nearest_product(value)
    return None if product is None else _packed_in(_factors(product)[1])


def _nearest_product(value: Node) -> Node | None:
    return next(filter(is_product, itertools.islice(computed_from(value), NEAR)), None)


def _packed_in(weight: Node) -> torch.dtype | None:
    """The dtype of an 8-bit graph input that a factor is computed from, if there is no product in between."""
    near = itertools.islice(computed_from(weight), NEAR)
    before = itertools.takewhile(lambda node: not is_product(node), near)
    return next((node.meta["val"].dtype for node in before if is_parameter(node) and has_8_bits(node)), None)


def is_product(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._opname in PRODUCTS


def _factors(product: Node) -> tuple[Node, Node]:
    first = 1 if product.target._opname in ADDING else 0  # type: ignore[union-attr]  # an overload, as all products are
    left, right = args_of(product)[first : first + 2]
    return left, right
