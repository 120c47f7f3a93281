"""Rows that the program quantises in tiles: codes, and a scale for each tile of adjacent columns.

    m = max |value| over a tile

    f = 127 / m,       codes = round(value * f),                          scale = 1 / f          QUOTIENT
    s = b * (1/127),   codes = round(clip(value, -b, b) * (1 / s)),       scale = s              PRODUCT

In the second form, b is m, or m times a number or a graph input; then nothing is clipped in the first case. Kernels
compute either in float32 and as it is written here. Codes and scales of a program that does not may differ from theirs
in the last bit; then `differences` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch

from .axes import Axis, combine, whole
from .calls import args_of, options_of
from .clipping import clipped
from .constant import constant, rounded
from .element import Element, Scales, operand
from .largest import largest
from .quantised_tokens import STEPS, Part, clipped_tokens, unbounded, whole_numbers
from .reading import Reading
from .same_value import equal_calls
from .sizes import Size, ratio

aten = torch.ops.aten
MULTIPLIES = frozenset({aten.mul.Tensor, aten.mul.Scalar})
Check = Callable[[Element], bool]
Computed = Callable[[Element, Check], bool]  # from the largest value, which the check recognises


@dataclass(frozen=True)
class Form:
    """How a kernel computes codes and scales: what multiplies a value, and its scale, in words and as a check of an
    element. `clips` says whether it clips values to a part of their largest one, which then counts as the largest."""

    codes: str
    scales: str
    multiplies: Computed
    is_scale: Computed
    clips: bool


@dataclass(frozen=True)
class QuantisedTiles(Reading):
    """What the codes of a row are quantised from, in tiles of `width` columns. Each tile is clipped to `number *
    factor` of its largest value; no `factor` is one.

    `whole` has the calls on the way from the rounded value to the codes."""

    value: Element
    width: Size
    differences: tuple[str, ...] = field(default=())
    whole: tuple[Node, ...] = field(default=())
    number: float = 1.0
    factor: Element | None = None

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
    found = clipped_tokens(replace(codes, scales=Scales((scale,), scale.dtype)))
    if found.over != (combine(0, [(lower, 1)]),):
        raise NoMatch(f"the scale of {width} adjacent codes is not that of these", codes.origin)
    if found.part is not None and not form.clips:
        raise NoMatch("latents are clipped to a part of their largest one, expected all of it", found.part.bound.origin)
    is_bound = _is_largest if found.part is None else functools.partial(_is_bound, part=found.part)
    differences = (
        *found.differences,
        *(() if _is_multiplied(codes, found.value, form, is_bound) else (form.codes,)),
        *(() if form.is_scale(unbounded(scale), is_bound) else (form.scales,)),
    )
    value = replace(found.value, top=None)  # of the row: the program reads it in tiles
    tiles = QuantisedTiles(codes.origin, value, width, differences, found.whole)
    if found.part is None:
        return tiles
    if found.part.factor is not None and found.part.factor.axes:
        source = found.part.factor.origin
        raise NoMatch("tiles are clipped to different parts of their largest values, expected one", source)
    return replace(tiles, number=found.part.number, factor=found.part.factor)


def _is_multiplied(codes: Element, value: Element, form: Form, is_bound: Check) -> bool:
    quotient = whole_numbers(codes).value
    sides = [operand(side, quotient.index) for side in args_of(quotient.origin)[:2] if isinstance(side, Node)]
    is_product = quotient.origin.target is aten.mul.Tensor and _is_as_computed(quotient)
    return is_product and value in map(_unclipped, sides) and any(form.multiplies(side, is_bound) for side in sides)


def _unclipped(element: Element) -> Element:
    clip = clipped(element)
    return element if clip is None else clip.value


def _is_as_computed(element: Element) -> bool:
    """Whether a value is computed in float32, and neither rounded nor multiplied after that."""
    is_wide = element.origin.meta["val"].dtype == torch.float32
    return is_wide and element.factor == 1.0 and not element.roundings


def _inverse(is_inner: Computed) -> Computed:
    """The check of the reciprocal, as computed."""

    def is_inverse(element: Element, is_bound: Check) -> bool:
        is_reciprocal = element.origin.target is aten.reciprocal.default and _is_as_computed(element)
        return is_reciprocal and is_inner(operand(args_of(element.origin)[0], element.index), is_bound)

    return is_inverse


def _is_largest(element: Element) -> bool:
    """Whether this is the largest magnitude of something, and not rounded or multiplied after that."""
    try:
        largest(element)
    except NoMatch:
        return False
    return not element.roundings


# --- the largest code divided by the largest value ---------------------------------------------------------------


def _is_true_factor(element: Element, is_bound: Check) -> bool:
    """Whether this is 127 / bound, a quotient of two tensors. PyTorch divides a number by a tensor otherwise."""
    node = element.origin
    if node.target is not aten.div.Tensor or options_of(node) or not _is_as_computed(element):
        return False
    steps, divisor = args_of(node)[:2]
    if not isinstance(steps, Node) or constant(steps) != STEPS or not isinstance(divisor, Node):
        return False
    return is_bound(unbounded(operand(divisor, element.index)))


QUOTIENT = Form(
    "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does",
    "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does",
    _is_true_factor,
    _inverse(_is_true_factor),
    clips=False,
)


# --- the largest value times a number ----------------------------------------------------------------------------


def _is_product(element: Element, is_bound: Check) -> bool:
    """Whether this is bound * (1/127) in float32, where values are clipped to the bound, or none is above it."""
    node, index = element.seen
    if node.target not in MULTIPLIES or node.meta["val"].dtype != torch.float32 or element.roundings:
        return False
    sides = args_of(node)[:2]
    bounds = [operand(side, index) for side in sides if isinstance(side, Node) and constant(side) is None]
    numbers = [number for side in sides if (number := constant(side)) is not None]
    if len(bounds) != 1 or [rounded(number, torch.float32) for number in numbers] != [INVERSE]:
        return False
    return is_bound(bounds[0])


def _is_bound(element: Element, part: Part) -> bool:
    """Whether this is the bound to which values are clipped: the largest, or the product of it and one factor."""
    (node, index), (other, place) = element.seen, part.bound.seen
    if index != place or not equal_calls(node, other) or element.roundings:
        return False
    if _is_largest(element):
        return True
    sides = [operand(side, index) for side in args_of(node)[:2] if isinstance(side, Node)]
    return node.target in MULTIPLIES and node.meta["val"].dtype == torch.float32 and any(map(_is_largest, sides))


INVERSE = rounded(1 / STEPS, torch.float32)
PRODUCT = Form(
    "codes are computed otherwise than as clipped value * (1 / scale), as a kernel does",
    "scales are computed otherwise than as bound * (1/127), as a kernel does",
    _inverse(_is_product),
    _is_product,
    clips=True,
)
