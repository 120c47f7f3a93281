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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import unset_fake_temporarily
from mla_fx.readings.axes import Axis, Index, combine, of_axis, whole
from mla_fx.readings.calls import args_of
from mla_fx.readings.constant import rounded
from mla_fx.readings.element import Element, Scales, resolve
from mla_fx.readings.sizes import Size, at_most, plain, ratio
from mla_fx.readings.views import shape_of

from .code_arithmetic import largest
from .tokens import STEPS, Evaluated, QuantisedTokens

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


class Form(NamedTuple):
    """How a kernel computes, from the bound to which values are clipped, what multiplies them and their scales; and
    what to say of others. `clips` says whether the bound may be a part of the largest value."""

    factor: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    other_codes: str
    other_scales: str
    clips: bool


def _quotient(bound: Tensor) -> Tensor:
    return torch.full_like(bound, STEPS) / bound  # two tensors: PyTorch divides a number by a tensor otherwise


QUOTIENT = Form(
    _quotient,
    lambda bound: 1 / _quotient(bound),
    "codes are computed otherwise than as value * (127 / largest) with a true quotient, as a kernel does",
    "scales are computed otherwise than as 1 / (127 / largest) with a true quotient, as a kernel does",
    clips=False,
)
PRODUCT = Form(
    lambda bound: 1 / (bound * (1 / STEPS)),
    lambda bound: bound * (1 / STEPS),
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
    evaluated = Evaluated.of(replace(codes, scales=Scales((scale,), scale.dtype)))
    found, part = evaluated.tokens, evaluated.part
    if found.over != (combine(0, [(lower, 1)]),):
        raise NoMatch(f"the scale of {width} adjacent codes is not that of these", codes.origin)
    if part is not None and not form.clips:
        raise NoMatch("latents are clipped to a part of their largest one, expected all of it", codes.origin)
    number, factor = (1.0, None) if part is None else (rounded(part.number, torch.float32), part.factor)
    if factor is not None and factor.axes:
        raise NoMatch("tiles are clipped to different parts of their largest values, expected one", factor.origin)
    differences = (*found.differences, *_other_bits(evaluated, form, number))
    value = replace(found.value, top=None)  # of the row: the program reads it in tiles
    return QuantisedTiles(codes.origin, value, found.whole, (), differences, width, number, factor)


def _other_bits(evaluated: Evaluated, form: Form, number: float) -> Iterator[str]:
    """Whether codes and scales have other last bits than those of a kernel, before codes are rounded."""
    with unset_fake_temporarily():
        draws = evaluated.draws
        bound = largest(draws.row).float() * number
        bound = bound if evaluated.part is None or evaluated.part.factor is None else bound * draws.given.float()
        values = draws.value.float().minimum(bound).maximum(-bound)
        codes, scales = evaluated.arithmetic.at(draws, *evaluated.places, rounds=True)
        if not (codes == values * form.factor(bound)).all():
            yield form.other_codes
        if not (scales == form.scale(bound)).all():
            yield form.other_scales


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
