"""Weights that a program dequantises, as what a product may compute them from: codes, scales and zero points.

    weight [K, N], or a batch of them = (codes - zeros) * scales, rounded once to its dtype"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.attention.codes import CODES
from mla_fx.readings.axes import Axes, axes_of, leaves, without_digits
from mla_fx.readings.calls import args_of, argument
from mla_fx.readings.codes.dequantised import Dequantised, dequantised
from mla_fx.readings.element import Element, before_cast, is_coarser, is_parameter, resolve
from mla_fx.readings.reading import renamed
from mla_fx.readings.sizes import Size
from mla_fx.readings.views import fresh_index, shape_of

from .materialize import size_over, tensor
from .plan import Call, Expression, ViewOf

aten = torch.ops.aten


@dataclass(frozen=True)
class CodedWeight:
    """Codes with the sizes of the weight. Scales and zeros are [B or 1, K', N'], one for each tile of the weight, which
    is `tile_k` by `tile_n`; a dimension of one serves all tiles."""

    codes: Expression
    scales: Expression | None
    zeros: Expression | None
    tile_k: Size
    tile_n: Size


def coded_weight(weight: Node) -> CodedWeight:
    """Read the right side of a product. Raises NoMatch if it is not dequantised from codes that the graph is given."""
    base, order = _uncut(weight)
    fresh = fresh_index(base)
    element = resolve(base, fresh)
    found = dequantised(element, CODES)
    if not is_parameter(found.codes.origin):
        raise NoMatch("the codes of a weight are computed", found.codes.origin)
    zeros = None if found.offset is None else found.offset.times(-1.0)
    _check_roundings(element, found, zeros)
    parts = [part for part in (found.codes, found.scale, zeros) if part is not None]
    parted = without_digits(index for part in parts for index in part.index)
    if parted is None:
        raise NoMatch("codes and their scales are read in parts of other sizes", weight)
    whole = [axes_of(fresh[dim]) or () for dim in order]
    codes = tensor(found.codes.stored, whole)
    for dim, size in enumerate(shape_of(weight)):
        codes = codes if shape_of(base)[order[dim]] == size else Call(aten.slice.Tensor, codes, dim, 0, size)
    codes = ViewOf(codes, found.codes.origin, "codes would be copied")
    *batch, inner, columns = (leaves(dim, parted) for dim in whole)
    scale, zeros = (None if part is None else renamed(part, parted) for part in (found.scale, zeros))
    given = [part for part in (scale, zeros) if part is not None]
    tiles = [_tiles(dim, given) for dim in (inner, columns)]
    dims = (batch[0] if batch else (), *tiles)
    tile_k, tile_n = (size_over(dim[len(tile) :]) for dim, tile in zip((inner, columns), tiles, strict=True))
    return CodedWeight(codes, _laid_out(scale, dims), _laid_out(zeros, dims), tile_k, tile_n)


def _uncut(weight: Node) -> tuple[Node, list[int]]:
    """What a weight is the first rows and columns of, and which of its dimensions are those of the weight. Scales of
    blocks may reach further than the weight."""
    order = list(range(len(shape_of(weight))))
    while weight.target is aten.permute.default or _is_cut(weight):
        if weight.target is aten.permute.default:
            order = [args_of(weight)[1][dim] for dim in order]
        weight = args_of(weight)[0]
    return weight, order


def _is_cut(weight: Node) -> bool:
    start, step = (argument(weight, 2, "start"), argument(weight, 4, "step", 1))
    return weight.target is aten.slice.Tensor and start in (None, 0) and step == 1


def _check_roundings(element: Element, found: Dequantised, zeros: Element | None) -> None:
    """Raises NoMatch unless the product with the scale is rounded once, and the difference of whole numbers never."""
    computed, dtype = element.origin.meta["val"].dtype, element.dtype
    expected = () if computed == dtype else (dtype,)
    if found.scale is not None and (computed not in (torch.float32, dtype) or element.roundings != expected):
        raise NoMatch(f"the weight is computed in {computed} and rounded more than once", element.origin)
    if found.scale is not None and is_coarser(computed, found.scale.dtype):
        raise NoMatch(f"scales in {found.scale.dtype} are multiplied in {computed}", found.scale.origin)
    if zeros is not None and before_cast(zeros).origin.meta["val"].dtype != torch.int8:
        raise NoMatch("codes have an offset that is no int8", zeros.origin)


def _tiles(dim: Axes, given: Iterable[Element]) -> Axes:
    """The axes of a dimension along which scales or zeros differ. Raises NoMatch if neighbours do and others do not."""
    varying = {axis for part in given for axis in part.axes}
    tiles = tuple(axis for axis in dim if axis in varying)
    if tiles != dim[: len(tiles)]:
        raise NoMatch("the scales of codes are not those of neighbours")
    return tiles


def _laid_out(part: Element | None, dims: Sequence[Axes]) -> Expression | None:
    if part is None:
        return None
    is_partly = any(set(dim) - part.axes and set(dim) & part.axes for dim in dims)
    return tensor(part, dims, dtype=torch.float32, expand=is_partly)
