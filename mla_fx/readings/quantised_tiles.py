"""Rows that the program quantises in tiles: codes, and a scale for each tile of adjacent columns.

    m = max |value| over a tile

    f = 127 / m,       codes = round(value * f),                          scale = 1 / f          QUOTIENT
    s = b * (1/127),   codes = round(clip(value, -b, b) * (1 / s)),       scale = s              PRODUCT

In the second form, b is m, or m times a number or a graph input; then nothing is clipped in the first case. Kernels
compute either in float32 and as it is written here. Codes and scales of a program that does not may differ from theirs
in the last bit; then `differences` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import Axis, combine, whole
from .bounds import clipped, unbounded
from .calls import MULTIPLIES, args_of, options_of
from .constant import constant, rounded
from .element import Element, Scales, operand, operands
from .largest import largest
from .quantised_tokens import STEPS, Part, clipped_tokens, whole_numbers
from .reading import Reading
from .same_value import equal_calls
from .sizes import Size, ratio

aten = torch.ops.aten
Step = Callable[[Element], Element | None]


@dataclass(frozen=True)
class Form:
    """How a kernel computes codes and scales: what multiplies a value, and its scale, in words and as steps from the
    largest value, the last one first. `clips` says whether it clips values to a part of it, which then counts as it."""

    codes: str
    scales: str
    multiplies: tuple[Step, ...]
    scale: tuple[Step, ...]
    clips: bool


@dataclass(frozen=True)
class QuantisedTiles(Reading):
    """What the codes of a row are quantised from, in tiles of `width` columns. Each tile is clipped to `number *
    factor` of its largest value; no `factor` is one.

    `whole` has the calls on the way from the rounded value to the codes."""

    value: Element
    width: Size
    differences: tuple[str, ...]
    whole: tuple[Node, ...]
    number: float
    factor: Element | None

    @property
    def constants(self) -> tuple[object, ...]:
        return self.width, self.differences, self.number


def quantised_tiles(codes: Element, column: Axis, scale: Element, tile: Axis, form: Form) -> QuantisedTiles:
    """Read codes along the columns of a row, and the scales of its tiles. Raises NoMatch if they are none."""
    width = ratio(column.size, tile.size)
    if width is None:
        raise NoMatch(f"rows of {column.size} codes have {tile.size} scales", codes.origin)
    upper, lower = whole(column).split(width)
    scale = scale.at({tile: combine(0, [(upper, 1)])})
    found, part = clipped_tokens(replace(codes, scales=Scales((scale,), scale.dtype)))
    if found.over != (combine(0, [(lower, 1)]),):
        raise NoMatch(f"the scale of {width} adjacent codes is not that of these", codes.origin)
    if part is not None and not form.clips:
        raise NoMatch("latents are clipped to a part of their largest one, expected all of it", part.clip.bound.origin)
    differences = (
        *found.differences,
        *(() if _is_multiplied(codes, found.value, form, part) else (form.codes,)),
        *(() if _is_computed(unbounded(scale), form.scale, part) else (form.scales,)),
    )
    value = replace(found.value, top=None)  # of the row: the program reads it in tiles
    number, factor = (1.0, None) if part is None else part[1:]
    if factor is not None and factor.axes:
        raise NoMatch("tiles are clipped to different parts of their largest values, expected one", factor.origin)
    return QuantisedTiles(codes.origin, value, width, differences, found.whole, number, factor)


def _is_multiplied(codes: Element, value: Element, form: Form, part: Part | None) -> bool:
    quotient = whole_numbers(codes).value
    factors = operands(quotient)
    if quotient.origin.target is not aten.mul.Tensor or not _is_as_computed(quotient):
        return False
    return value in map(_unclipped, factors) and any(_is_computed(one, form.multiplies, part) for one in factors)


def _unclipped(element: Element) -> Element:
    clip = clipped(element)
    return element if clip is None else clip.value


def _is_computed(element: Element, steps: tuple[Step, ...], part: Part | None) -> bool:
    """Whether steps compute an element from the bound to which values are clipped, the last one first."""
    for step in steps:
        found = step(element)
        if found is None:
            return False
        element = found
    return _is_bound(element, part)


def _is_bound(element: Element, part: Part | None) -> bool:
    """Whether this is the largest value, or the product of it and one factor to which values are clipped. Then it is
    neither rounded nor multiplied."""
    if part is None:
        return _is_largest(element)
    (node, index), (other, place) = element.seen, part.clip.bound.seen
    if index != place or not equal_calls(node, other) or element.roundings:
        return False
    is_product = node.target in MULTIPLIES and node.meta["val"].dtype == torch.float32
    return _is_largest(element) or (is_product and any(map(_is_largest, operands(Element(node, index)))))


def _is_largest(element: Element) -> bool:
    try:
        largest(element)
    except NoMatch:
        return False
    return not element.roundings


def _is_as_computed(element: Element) -> bool:
    """Whether a value is computed in float32, and neither rounded nor multiplied after that."""
    is_wide = element.origin.meta["val"].dtype == torch.float32
    return is_wide and element.factor == 1.0 and not element.roundings


# --- steps: what an element is computed from in float32, if it is so --------------------------------------------------


def _inverse(element: Element) -> Element | None:
    """`x` of `1 / x`."""
    node = element.origin
    is_inverse = node.target is aten.reciprocal.default and _is_as_computed(element)
    return operand(args_of(node)[0], element.index) if is_inverse else None


def _divides(element: Element) -> Element | None:
    """`x` of `127 / x`, a quotient of two tensors. PyTorch divides a number by a tensor otherwise."""
    node = element.origin
    if node.target is not aten.div.Tensor or options_of(node) or not _is_as_computed(element):
        return None
    steps, divisor = args_of(node)[:2]
    is_true = isinstance(steps, Node) and constant(steps) == STEPS and isinstance(divisor, Node)
    return unbounded(operand(divisor, element.index)) if is_true else None


def _multiplies(element: Element) -> Element | None:
    """`x` of `x * (1/127)`."""
    node, index = element.seen
    if node.target not in MULTIPLIES or node.meta["val"].dtype != torch.float32 or element.roundings:
        return None
    sides = args_of(node)[:2]
    values = [side for side in sides if constant(side) is None]
    numbers = [rounded(number, torch.float32) for side in sides if (number := constant(side)) is not None]
    return operand(values[0], index) if numbers == [INVERSE] else None


INVERSE = rounded(1 / STEPS, torch.float32)
QUOTIENT = Form(
    "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does",
    "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does",
    (_divides,),
    (_inverse, _divides),
    clips=False,
)
PRODUCT = Form(
    "codes are computed otherwise than as clipped value * (1 / scale), as a kernel does",
    "scales are computed otherwise than as bound * (1/127), as a kernel does",
    (_inverse, _multiplies),
    (_multiplies,),
    clips=True,
)
