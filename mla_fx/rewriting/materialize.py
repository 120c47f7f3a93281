"""From elements to tensors, and back: the views that lay a value out along wanted dimensions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axis, Index, axes_of, composite, cuts, slowest_first, substitute
from mla_fx.readings.element import Element
from mla_fx.readings.sizes import Size, at_most, product, ratio, size_of
from mla_fx.readings.unproved import AT_MOST, MULTIPLE, unproved
from mla_fx.readings.views import shape_of

from .emitter import Emitter

aten = torch.ops.aten

Axes = tuple[Axis, ...]
Dims = Sequence[Sequence[Axis]]


def tensor(
    emit: Emitter, element: Element, dims: Dims, *, dtype: torch.dtype | None = None, expand: bool = False
) -> Node:
    """The tensor whose element at `dims` is `element`; each dimension runs over some axes, slowest first.

    An axis the element does not depend on gives a dimension of one, or is repeated if `expand`. Raises NoMatch if the
    element depends on other axes, or if `dtype` would round it where the program does not."""
    if dtype is not None and not element.is_exact_in(dtype):
        held = element.dtype
        raise NoMatch(f"a value is held in {held}, which the operator would round to {dtype}", element.origin)
    emit.sources.add(element.origin)
    node, index, factor = element.held
    index, wanted = _parted(node, index, dims)
    if len(index) == len(shape_of(node)) + 1:
        node = emit.call(aten.view_as_real.default, _unconjugated(emit, node))
    node = _arranged(emit, *_spread(emit, node, index, wanted), wanted)
    if expand:
        node = _expanded(emit, node, wanted)
    return emit.cast(emit.scaled(node, factor), dtype or element.dtype)


def result(node: Node, roles: Dims) -> Element:
    """A new tensor as an element of the axes that its dimensions run over."""
    return Element(node, tuple(map(composite, roles)))


def axes(index: Index, what: str, node: Node) -> Axes:
    """The axes that a dimension runs over, slowest first. Raises NoMatch if it is not laid out over whole axes."""
    found = axes_of(index)
    if found is None:
        raise NoMatch(f"{what} is read in steps or from the midst, not as a whole dimension", node)
    return found


def ordered(found: Set[Axis], outer: Axes) -> Axes:
    """Axes in the order in which they stand in `outer`, and behind them those that do not."""
    return tuple(sorted(found, key=lambda axis: (outer.index(axis) if axis in outer else len(outer), axis.serial)))


def _unconjugated(emit: Emitter, node: Node) -> Node:
    return emit.call(aten.resolve_conj.default, node) if node.meta["val"].is_conj() else node


def _parted(node: Node, index: tuple[Index, ...], dims: Dims) -> tuple[tuple[Index, ...], list[Axes]]:
    """Index and dimensions over axes of which neither reads only a part."""
    named = [axis for dim in dims for axis in dim]
    if len(set(named)) < len(named):
        raise NoMatch("two dimensions of an operand run over one axis", node)
    replacements = cuts(index)
    if replacements is None:
        raise NoMatch("a dimension is read in parts that do not go together", node)
    wanted = [_leaves(dim, replacements) for dim in dims]
    if not replacements:
        return index, wanted
    moved = (substitute(part, replacements) for part in index)
    return tuple(part for part in moved if part is not None), wanted


def _leaves(dim: Sequence[Axis], replacements: dict[Axis, Index]) -> Axes:
    if not replacements:
        return tuple(axis for axis in dim if axis.size != 1)
    parts = ((axes_of(replacements[axis]) or ()) if axis in replacements else (axis,) for axis in dim)
    return tuple(axis for part in parts for axis in part if axis.size != 1)


def _spread(emit: Emitter, node: Node, index: tuple[Index, ...], wanted: list[Axes]) -> tuple[Node, list[Axes]]:
    """`node` with what is fixed selected away, and the groups of axes that its dimensions then run over.

    The node may have other dimensions than the groups say, if a reshape leads from one to the other."""
    sizes = shape_of(node)
    places = [place for part, size in zip(index, sizes, strict=True) for place in _places(node.graph, part, size)]
    places = [place for place in places if place.radix != 1]
    if all(place.is_whole for place in places):
        return node, _grouped([(place.axis,) for place in places if place.axis], wanted)
    node = reshape(emit, node, [place.radix for place in places])
    units: list[Axes] = []
    for place in places:
        if place.axis is None:
            node = emit.call(aten.select.int, node, len(units), emit.size(place.start))
            continue
        if not place.is_whole:
            stop = emit.size(place.start + place.axis.size)
            node = emit.call(aten.slice.Tensor, node, len(units), emit.size(place.start), stop)
        units.append((place.axis,))
    return node, _grouped(units, wanted)


def _arranged(emit: Emitter, node: Node, units: list[Axes], wanted: list[Axes]) -> Node:
    """Permutes and merges the groups of axes into the wanted dimensions."""
    present = {axis for unit in units for axis in unit}
    if present != {axis for dim in wanted for axis in dim if axis in present}:
        raise NoMatch("a value depends on an axis it should not depend on", node)
    if sum(map(len, units)) != len(present):
        raise NoMatch("a value is read along a diagonal", node)
    if any(not present.isdisjoint(dim) and not present.issuperset(dim) for dim in wanted):
        raise NoMatch("a value depends on only a part of a dimension", node)
    position = {axis: place for place, axis in enumerate(axis for dim in wanted for axis in dim)}
    order = sorted(range(len(units)), key=lambda unit: position[units[unit][0]])
    if order != list(range(len(units))):
        node = reshape(emit, node, [product(axis.size for axis in unit) for unit in units])
        node = emit.call(aten.permute.default, node, order)
    return reshape(emit, node, [product(axis.size for axis in dim if axis in present) for dim in wanted])


def _expanded(emit: Emitter, node: Node, wanted: list[Axes]) -> Node:
    sizes = [product(axis.size for axis in dim) for dim in wanted]
    if list(shape_of(node)) == sizes:
        return node
    return emit.call(aten.expand.default, node, [emit.size(size) for size in sizes])


def reshape(emit: Emitter, node: Node, sizes: Sequence[Size]) -> Node:
    if list(shape_of(node)) == list(sizes):
        return node
    unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
    inferred = unknown[0] if len(unknown) == 1 else None
    given = [-1 if dim == inferred else emit.size(size) for dim, size in enumerate(sizes)]
    return emit.call(aten.reshape.default, node, given)


class _Place(NamedTuple):
    """One place of a dimension written as a mixed-radix number: read along `axis` from `start`, or fixed there."""

    radix: Size
    axis: Axis | None
    start: Size

    @property
    def is_whole(self) -> bool:
        return self.axis is not None and self.start == 0 and self.axis.size == self.radix


def _places(graph: Graph, part: Index, size: Size) -> list[_Place]:
    if part.axis is not None and part.axis.size == size:
        return [_Place(size, part.axis, 0)]
    rest, offset = size, part.offset
    out: list[_Place] = []
    ordered = slowest_first(part.terms)
    if ordered is None:
        raise NoMatch(f"a dimension of {size} is read in steps of which none is known to be the largest")
    for digit, stride in ordered:
        radix = ratio(rest, stride)
        start = 0 if offset == 0 else offset // stride
        offset = offset - start * stride
        because = f"a dimension of {size} is read in steps of {stride}, which is no view of it"
        if radix is None:
            raise NoMatch(because + unproved(graph, rest, MULTIPLE, stride))
        if not digit.is_whole:
            raise NoMatch(because)
        if not at_most(start + digit.size, radix):
            raise NoMatch(because + unproved(graph, start + digit.size, AT_MOST, radix))
        out.append(_Place(radix, digit.axis, start))
        rest = stride
    if rest != 1 or not part.terms:
        out.append(_Place(rest, None, offset))
    return out


def _grouped(units: list[Axes], wanted: list[Axes]) -> list[Axes]:
    """Neighbouring groups that are neighbours in a wanted dimension too, merged: no reshape need part them."""
    follows = {left: right for dim in wanted for left, right in itertools.pairwise(dim)}
    merged: list[Axes] = []
    for unit in units:
        if merged and follows.get(merged[-1][-1]) is unit[0]:
            merged[-1] = (*merged[-1], *unit)
        else:
            merged.append(unit)
    return merged


# --- strides -----------------------------------------------------------------------------------------------------


def laid_out_as(emit: Emitter, old: Node, new: Node) -> Node:
    """`new` with the strides of `old`: what follows was traced for those, and a view of other ones would fail."""
    strides, offset = _strides_and_offset(old)
    if (strides, offset) == _strides_and_offset(new):
        return new
    order = _slowest_first(strides)
    if order == list(range(len(order))):
        return emit.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    ordered = emit.call(aten.permute.default, new, order)
    dense = emit.call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return emit.call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])


def fill_memory_alike(one: Node, other: Node) -> bool:
    """Both are all that their memory holds, in the same order: what reads one by strides may read the other."""
    is_whole = all(_is_whole(node.meta["val"]) for node in (one, other))
    return is_whole and _strides_and_offset(one) == _strides_and_offset(other)


def _is_whole(value: torch.Tensor) -> bool:
    return statically_known_true(value.numel() * value.dtype.itemsize == value.untyped_storage().nbytes())


def _strides_and_offset(node: Node) -> tuple[list[Size], Size]:
    value = node.meta["val"]
    return [size_of(stride) for stride in value.stride()], size_of(value.storage_offset())


def _slowest_first(strides: Sequence[Size]) -> list[int]:
    """Dimensions by falling stride, in order where strides are equal."""

    def compare(one: int, two: int) -> int:
        if strides[one] == strides[two]:
            return one - two
        return 1 if at_most(strides[one], strides[two]) else -1

    return sorted(range(len(strides)), key=functools.cmp_to_key(compare))
