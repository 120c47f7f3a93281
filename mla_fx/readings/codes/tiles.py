"""Rows that the program quantises in tiles: codes, and a scale for each tile of adjacent columns.

    m = max |value| over a tile

    f = 127 / m,       codes = round(value * f),                          scale = 1 / f          QUOTIENT
    s = b * (1/127),   codes = round(clip(value, -b, b) * (1 / s)),       scale = s              PRODUCT

In the second form, b is m, or m times a number or a graph input; then nothing is clipped in the first case. Kernels
compute either in float32 and as it is written here. Codes and scales of a program that does not may differ from theirs
in the last bit; then `differences` says why.

Rows of a cache are bytes: int8 codes of a latent, the bytes of its rotary key in 16 bits, and those of a float32 scale
for each tile, in this order. Bytes come from `view(dtype)`. A row may be joined by a cat, or be an empty tensor into
whose columns the parts are written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch, attempt
from mla_fx.readings.axes import Axis, Index, combine, of_axis, whole
from mla_fx.readings.bounds import clipped, unbounded
from mla_fx.readings.calls import MULTIPLIES, args_of, options_of
from mla_fx.readings.constant import constant, rounded
from mla_fx.readings.element import Element, Scales, operand, operands, resolve
from mla_fx.readings.same_value import equal_calls
from mla_fx.readings.sizes import Size, at_most, plain, ratio
from mla_fx.readings.views import shape_of

from .tokens import STEPS, ClippedTo, QuantisedTokens, clipped_tokens, largest
from .whole_numbers import whole_numbers

aten = torch.ops.aten
INVERSE = rounded(1 / STEPS, torch.float32)
HALVES = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """How a kernel computes codes and scales: what multiplies a value, and its scale, as `_spelled` says them, and what
    to say of others. `clips` says whether it clips values to a part of the largest one, which then counts as it."""

    factor: str
    scale: str
    other_codes: str
    other_scales: str
    clips: bool


QUOTIENT = Form(
    "127 / (bound)",
    "1 / (127 / (bound))",
    "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does",
    "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does",
    clips=False,
)
PRODUCT = Form(
    "1 / (1/127 * (bound))",
    "1/127 * (bound)",
    "codes are computed otherwise than as clipped value * (1 / scale), as a kernel does",
    "scales are computed otherwise than as bound * (1/127), as a kernel does",
    clips=True,
)


@dataclass(frozen=True)
class QuantisedTiles(QuantisedTokens):
    """Codes of a row in tiles of `width` columns. Each tile is clipped to `number * factor` of its largest value; no
    `factor` is one. `over` is empty, because a row is read as a whole."""

    width: Size
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
        *(() if _is_multiplied(codes, found.value, form, part) else (form.other_codes,)),
        *(() if _spelled(unbounded(scale), part) == form.scale else (form.other_scales,)),
    )
    value = replace(found.value, top=None)  # of the row: the program reads it in tiles
    number, factor = (1.0, None) if part is None else part[1:]
    if factor is not None and factor.axes:
        raise NoMatch("tiles are clipped to different parts of their largest values, expected one", factor.origin)
    return QuantisedTiles(codes.origin, value, found.whole, (), differences, width, number, factor)


def _is_multiplied(codes: Element, value: Element, form: Form, part: ClippedTo | None) -> bool:
    quotient = whole_numbers(codes).value
    factors = operands(quotient)
    if quotient.origin.target is not aten.mul.Tensor or not _is_as_computed(quotient):
        return False
    return value in map(_unclipped, factors) and any(_spelled(one, part) == form.factor for one in factors)


def _unclipped(element: Element) -> Element:
    clip = clipped(element)
    return element if clip is None else clip.value


def _spelled(element: Element, part: ClippedTo | None) -> str:
    """How the program computes an element in float32 from the bound to which values are clipped, or their largest one:
    each call on the way, where any other gives other numbers in the last bit; empty for an element that has others."""
    if _is_bound(element, part):
        return "bound"
    node, index = element.origin, element.index
    if _is_as_computed(element) and node.target is aten.reciprocal.default:
        return _around("1 / ", operand(args_of(node)[0], index), part)
    if _is_as_computed(element) and node.target is aten.div.Tensor and not options_of(node):
        steps, divisor = args_of(node)[:2]  # two tensors: PyTorch divides a number by a tensor otherwise
        is_true = isinstance(steps, Node) and constant(steps) == STEPS and isinstance(divisor, Node)
        return _around("127 / ", unbounded(operand(divisor, index)), part) if is_true else ""
    node, index = element.seen
    if node.target not in MULTIPLIES or node.meta["val"].dtype != torch.float32 or element.roundings:
        return ""
    sides = args_of(node)[:2]
    values = [side for side in sides if constant(side) is None]
    numbers = [rounded(number, torch.float32) for side in sides if (number := constant(side)) is not None]
    return _around("1/127 * ", operand(values[0], index), part) if numbers == [INVERSE] else ""


def _around(call: str, element: Element, part: ClippedTo | None) -> str:
    inner = _spelled(element, part)
    return f"{call}({inner})" if inner else ""


def _is_bound(element: Element, part: ClippedTo | None) -> bool:
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
    return attempt(largest, element) is not None and not element.roundings


def _is_as_computed(element: Element) -> bool:
    """Whether a value is computed in float32, and neither rounded nor multiplied after that."""
    is_wide = element.origin.meta["val"].dtype == torch.float32
    return is_wide and element.factor == 1.0 and not element.roundings


@dataclass(frozen=True)
class PackedRows:
    """Codes along `column`, rotary keys along `key`, and scales along `tile`."""

    codes: Element
    column: Axis
    keys: Element
    key: Axis
    scales: Element
    tile: Axis


def packed_rows(row: Element, byte: Axis, latents: Size) -> PackedRows:
    """Read a row of so many latents, along its bytes. Raises NoMatch if it is not packed so."""
    if at_most(byte.size, latents):
        raise NoMatch(f"rows have {byte.size} bytes, expected more than {latents} codes", row.origin)
    if (stored := _stored(row, byte, 0).meta["val"].dtype) != torch.int8:
        raise NoMatch(f"rows begin with {stored}, expected codes in torch.int8", row.origin)
    rotary = _stored(row, byte, latents)
    if (stored := rotary.meta["val"].dtype) not in HALVES:
        raise NoMatch(f"behind {latents} codes, rows hold {stored}, expected a rotary key in 16 bits", row.origin)
    keys = shape_of(rotary)[-1]
    start = plain(latents + 2 * keys)
    left = plain(byte.size - start)
    tiles = ratio(left, 4)
    if tiles is None or not at_most(1, tiles):
        raise NoMatch(f"rows have {left} bytes behind the rotary key, expected 4 for each scale", row.origin)
    if (stored := _stored(row, byte, start).meta["val"].dtype) != torch.float32:
        raise NoMatch(f"behind the rotary key, rows hold {stored}, expected scales in torch.float32", row.origin)
    column, key, tile = Axis(latents), Axis(keys), Axis(tiles)
    return PackedRows(
        *(row.at({byte: of_axis(column)}), column),
        *(_of_bytes(row, byte, latents, key, 2, "a rotary key"), key),
        *(_of_bytes(row, byte, start, tile, 4, "the scales of a row"), tile),
    )


def _stored(row: Element, byte: Axis, place: Size) -> Node:
    """The value to which a byte of a row belongs."""
    node: Node = row.at({byte: Index(place)}).origin
    source: Node = args_of(node)[0] if node.target is aten.view.dtype else node
    return source


def _of_bytes(row: Element, byte: Axis, start: Size, axis: Axis, width: int, what: str) -> Element:
    """The value whose elements of `width` bytes are in a row from a start on, read along an axis."""
    part = whole(Axis(width))
    found = row.at({byte: combine(start, [(whole(axis), width), (part, 1)])})
    if found.origin.target is not aten.view.dtype:
        raise NoMatch(f"the bytes of {what} are not those of one value", found.origin)
    last = found.index[-1]
    offset = ratio(last.offset, width)
    terms = [(digit, ratio(stride, width)) for digit, stride in last.terms if digit != part]
    if offset is None or (part, 1) not in last.terms or any(stride is None for _, stride in terms):
        raise NoMatch(f"the bytes of {what} are not in order", found.origin)
    place = combine(offset, [(digit, stride) for digit, stride in terms if stride is not None])
    return resolve(args_of(found.origin)[0], (*found.index[:-1], place))
