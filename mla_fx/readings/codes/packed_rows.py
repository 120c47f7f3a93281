"""Rows of bytes: int8 codes of a latent, the bytes of its rotary key in 16 bits, and those of a float32 scale for each
tile of adjacent codes, in this order.

Bytes come from `view(dtype)`. A row may be joined by a cat, or be an empty tensor into whose columns the parts are
written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axis, Index, combine, of_axis, whole
from mla_fx.readings.calls import args_of
from mla_fx.readings.element import Element, resolve
from mla_fx.readings.sizes import Size, at_most, plain, ratio
from mla_fx.readings.views import shape_of

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


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
