"""Rows that the program quantises in tiles: codes, and a scale for each tile of adjacent columns.

    m = max |value| over a tile,   f = 127 / m,   codes = round(value * f),   scale = 1 / f

Kernels compute this in float32 and as it is written here, where the quotient f is rounded once. Codes and scales of
a program that does not may differ from theirs in the last bit; then `differences` says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import Axis, combine, whole
from .calls import args_of, options_of
from .constant import constant
from .element import Element, Scales, operand
from .largest import largest
from .quantised_tokens import STEPS, quantised_tokens, unbounded, whole_numbers
from .reading import Reading
from .sizes import ratio

aten = torch.ops.aten
FACTOR = "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does"
SCALE = "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does"


@dataclass(frozen=True)
class QuantisedTiles(Reading):
    """What the codes of a row are quantised from.

    `whole` has the calls on the way from the rounded value to the codes."""

    value: Element
    differences: tuple[str, ...] = field(default=())
    whole: tuple[Node, ...] = field(default=())

    @property
    def constants(self) -> tuple[str, ...]:
        return self.differences


def quantised_tiles(codes: Element, column: Axis, scale: Element, tile: Axis) -> QuantisedTiles:
    """Read codes along the columns of a row, and the scales of its tiles. Raises NoMatch if they are none."""
    width = ratio(column.size, tile.size)
    if width is None:
        raise NoMatch(f"rows of {column.size} codes have {tile.size} scales", codes.origin)
    upper, lower = whole(column).split(width)
    scale = scale.at({tile: combine(0, [(upper, 1)])})
    found = quantised_tokens(replace(codes, scales=Scales((scale,), scale.dtype)), guard=0.0)
    if found.over != (combine(0, [(lower, 1)]),):
        raise NoMatch(f"the scale of {width} adjacent codes is not that of these", codes.origin)
    differences = (*found.differences, *_other_factor(codes, found.value), *_other_scale(scale))
    value = replace(found.value, top=None)  # of the row: the program reads it in tiles
    return QuantisedTiles(codes.origin, value, differences, found.whole)


def _other_factor(codes: Element, value: Element) -> Iterator[str]:
    quotient = whole_numbers(codes).value
    sides = [operand(side, quotient.index) for side in args_of(quotient.origin)[:2] if isinstance(side, Node)]
    is_product = quotient.origin.target is aten.mul.Tensor and _is_as_computed(quotient)
    if not is_product or value not in sides or not any(map(_is_true_factor, sides)):
        yield FACTOR


def _other_scale(scale: Element) -> Iterator[str]:
    scale = unbounded(scale)
    is_reciprocal = scale.origin.target is aten.reciprocal.default and _is_as_computed(scale)
    if not is_reciprocal or not _is_true_factor(operand(args_of(scale.origin)[0], scale.index)):
        yield SCALE


def _is_true_factor(element: Element) -> bool:
    """Whether this is 127 / largest, a quotient of two tensors. PyTorch divides a number by a tensor otherwise."""
    node = element.origin
    if node.target is not aten.div.Tensor or options_of(node) or not _is_as_computed(element):
        return False
    steps, divisor = args_of(node)[:2]
    if not isinstance(steps, Node) or constant(steps) != STEPS or not isinstance(divisor, Node):
        return False
    maximum = unbounded(operand(divisor, element.index))
    try:
        largest(maximum)
    except NoMatch:
        return False
    return not maximum.roundings


def _is_as_computed(element: Element) -> bool:
    """Whether a value is computed in float32, and neither rounded nor multiplied after that."""
    is_wide = element.origin.meta["val"].dtype == torch.float32
    return is_wide and element.factor == 1.0 and not element.roundings
