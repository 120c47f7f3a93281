"""Turns elements into tensors: the views that lay a value out along wanted dimensions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axes, Axis, Dims, Index, axes_of, slowest_first, substitute, without_digits
from mla_fx.readings.element import Element, Scales
from mla_fx.readings.equal_sizes import AT_MOST, MULTIPLE, unproved
from mla_fx.readings.sizes import Size, at_most, common, product, ratio, size_of
from mla_fx.readings.views import shape_of

from .draft import Draft, value_of
from .emitter import Emitter
from .plan import Call, Cast, Computed, Expression, Value, first_node, times

aten = torch.ops.aten


def tensor(
    element: Element | Computed,
    dims: Dims,
    *,
    dtype: torch.dtype | None = None,
    expand: bool = False,
    read_by: Node | None = None,
) -> Expression:
    """The tensor whose element at `dims` is `element`. Each dimension runs over some axes, slowest first.

    An axis that the element does not depend on gives a dimension of one, or is repeated if `expand`. Raises NoMatch if
    the element depends on other axes, or on some of a dimension's and not on all unless `expand`, or if `dtype` would
    round it where the program does not. `read_by` is the call by which the program reads the element, if that does more
    than views and casts."""
    base, index, factor = _base(element, dtype, read_by)
    index, wanted = _parted(base, index, dims)
    base, units = _spread(base, index, wanted)
    laid = _arranged(*(_repeated(base, units, wanted) if expand else (base, units)), wanted)
    value = _expanded(laid, wanted) if expand else laid.value
    scales = element.scales if isinstance(element, Element) else None
    if base.node.meta["val"].dtype.itemsize == 1 and isinstance(element, Element) and (factor != 1.0 or scales):
        value = Cast(value, torch.promote_types(torch.float32, element.dtype))
    value = scaled_by(scales, times(value, factor), dims)
    wanted_dtype = dtype or (element.dtype if isinstance(element, Element) else None)
    return value if wanted_dtype is None else Cast(value, wanted_dtype)


def scaled_by(scales: Scales | None, value: Expression, dims: Dims) -> Expression:
    """A value with dimensions `dims` times the scales that belong to them."""
    by = () if scales is None else (tensor(scale, dims) for scale in scales.by)
    return functools.reduce(lambda *both: Call(aten.mul.Tensor, *both), by, value)


class _Sized(NamedTuple):
    value: Expression
    sizes: tuple[Size, ...]

    @property
    def node(self) -> Node:
        """A node to name in a refusal."""
        return first_node(self.value)

    def reshaped(self, sizes: Sequence[Size]) -> _Sized:
        if list(self.sizes) == list(sizes):
            return self
        unknown = [dim for dim, size in enumerate(sizes) if not isinstance(size, int)]
        inferred = unknown[0] if len(unknown) == 1 else None
        given = [-1 if dim == inferred else size for dim, size in enumerate(sizes)]
        return _Sized(Call(aten.reshape.default, self.value, given), tuple(sizes))


def _base(
    element: Element | Computed, dtype: torch.dtype | None, read_by: Node | None
) -> tuple[_Sized, tuple[Index, ...], float]:
    """The tensor that an element is read from, the index, and the factor."""
    if isinstance(element, Computed):
        return _Sized(element.value, element.sizes), element.index, 1.0
    if dtype is not None and not element.is_exact_in(dtype):
        raise NoMatch(f"a value in {element.dtype} would be rounded to {dtype} by the operator", element.origin)
    node, index, factor = element.as_operand
    value: Expression = Value(node, element.origin, read_by)
    sizes = shape_of(node)
    if len(index) == len(sizes) + 1:
        value = Call(aten.resolve_conj.default, value) if node.meta["val"].is_conj() else value
        value, sizes = Call(aten.view_as_real.default, value), (*sizes, 2)
    return _Sized(value, sizes), index, factor


def _parted(base: _Sized, index: tuple[Index, ...], dims: Dims) -> tuple[tuple[Index, ...], list[Axes]]:
    """The index and dimensions, rewritten over axes that both read as a whole."""
    named = [axis for dim in dims for axis in dim]
    if len(set(named)) < len(named):
        raise NoMatch("two dimensions of an operand run over one axis", base.node)
    replacements = without_digits(index)
    if replacements is None:
        raise NoMatch("a dimension is read in incompatible parts", base.node)
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


def _spread(base: _Sized, index: tuple[Index, ...], wanted: list[Axes]) -> tuple[_Sized, list[Axes]]:
    """The tensor with its fixed places selected, and the groups of axes that its dimensions then run over.

    Its dimensions may differ from the groups, if a reshape leads from one to the other."""
    places = [place for part, size in zip(index, base.sizes, strict=True) for place in _places(base, part, size)]
    places = [place for place in places if place.radix != 1]
    if all(place.is_whole for place in places):
        return base, _grouped([(place.axis,) for place in places if place.axis], wanted)
    value = base.reshaped([place.radix for place in places]).value
    units: list[Axes] = []
    for place in places:
        if place.axis is None:
            value = Call(aten.select.int, value, len(units), place.start)
            continue
        if not place.is_whole:
            steps = [] if place.step == 1 else [place.step]
            value = Call(aten.slice.Tensor, value, len(units), place.start, place.stop, *steps)
        units.append((place.axis,))
    return _Sized(value, tuple(axis.size for (axis,) in units)), _grouped(units, wanted)


def _repeated(base: _Sized, units: list[Axes], wanted: list[Axes]) -> tuple[_Sized, list[Axes]]:
    """The tensor, repeated along the axes that it lacks of a dimension that it has in part."""
    present = {axis for unit in units for axis in unit}
    lacking = [axis for dim in wanted if not present.isdisjoint(dim) for axis in dim if axis not in present]
    if not lacking:
        return base, units
    sizes = (*(axis.size for axis in lacking), *base.sizes)
    return _Sized(Call(aten.expand.default, base.value, list(sizes)), sizes), [*((axis,) for axis in lacking), *units]


def _arranged(base: _Sized, units: list[Axes], wanted: list[Axes]) -> _Sized:
    """Permutes and merges the groups of axes into the wanted dimensions."""
    present = {axis for unit in units for axis in unit}
    if present != {axis for dim in wanted for axis in dim if axis in present}:
        raise NoMatch("a value depends on an axis that it must not depend on", base.node)
    if sum(map(len, units)) != len(present):
        raise NoMatch("a value is read along a diagonal", base.node)
    if any(not present.isdisjoint(dim) and not present.issuperset(dim) for dim in wanted):
        raise NoMatch("a value depends on only part of a dimension", base.node)
    position = {axis: place for place, axis in enumerate(axis for dim in wanted for axis in dim)}
    order = sorted(range(len(units)), key=lambda unit: position[units[unit][0]])
    if order != list(range(len(units))):
        base = base.reshaped([size_over(unit) for unit in units])
        base = _Sized(Call(aten.permute.default, base.value, order), tuple(base.sizes[unit] for unit in order))
    return base.reshaped([size_over(axis for axis in dim if axis in present) for dim in wanted])


def _expanded(base: _Sized, wanted: list[Axes]) -> Expression:
    sizes = list(map(size_over, wanted))
    return base.value if list(base.sizes) == sizes else Call(aten.expand.default, base.value, sizes)


def size_over(axes: Iterable[Axis]) -> Size:
    return product(axis.size for axis in axes)


class _Place(NamedTuple):
    """One digit of a dimension as a mixed-radix number: read along `axis` in steps from `start`, or fixed there."""

    radix: Size
    axis: Axis | None
    start: Size
    step: int = 1

    @property
    def stop(self) -> Size:
        length = 1 if self.axis is None else self.axis.size
        return self.start + self.step * (length - 1) + 1

    @property
    def is_whole(self) -> bool:
        return self.axis is not None and self.start == 0 and self.axis.size == self.radix


def _places(base: _Sized, part: Index, size: Size) -> list[_Place]:
    if part.axis is not None and part.axis.size == size:
        return [_Place(size, part.axis, 0)]
    rest, offset = size, part.offset
    out: list[_Place] = []
    ordered = slowest_first(part.terms)
    if ordered is None:
        raise NoMatch(f"a dimension of {size} is read in steps, none of them provably the largest")
    for digit, stride in ordered:
        unit = common(rest, stride)
        step, start = ratio(stride, unit), 0 if offset == 0 else offset // unit
        because = f"a dimension of {size} is read in steps of {stride}, which no view does"
        if not isinstance(step, int):
            raise NoMatch(because + unproved(base.node.graph, rest, MULTIPLE, stride))
        if step < 1 or not digit.is_whole:
            raise NoMatch(because)
        place = _Place(ratio(rest, unit), digit.axis, start, step)
        if not at_most(place.stop, place.radix):
            raise NoMatch(because + unproved(base.node.graph, place.stop, AT_MOST, place.radix))
        out.append(place)
        rest, offset = unit, offset - start * unit
    if rest != 1 or not part.terms:
        out.append(_Place(rest, None, offset))
    return out


def _grouped(units: list[Axes], wanted: list[Axes]) -> list[Axes]:
    """The groups, merged where neighbours are also neighbours in a wanted dimension, so that no reshape splits them."""
    follows = {left: right for dim in wanted for left, right in itertools.pairwise(dim)}
    merged: list[Axes] = []
    for unit in units:
        if merged and follows.get(merged[-1][-1]) is unit[0]:
            merged[-1] = (*merged[-1], *unit)
        else:
            merged.append(unit)
    return merged


# --- strides -----------------------------------------------------------------------------------------------------


def laid_out_as(emit: Emitter, old: Node, new: Node | Draft) -> Node | Draft:
    """`new` with the strides of `old`: its readers were traced for these, and a view of other strides would fail."""
    strides, offset = _strides_and_offset(old)
    if (strides, offset) == _strides_and_offset(new):
        return new
    order = _slowest_first(strides)
    if order == list(range(len(order))):
        return emit.call(aten.clone.default, new, memory_format=torch.contiguous_format)
    ordered = emit.call(aten.permute.default, new, order)
    dense = emit.call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return emit.call(aten.permute.default, dense, [order.index(dim) for dim in range(len(order))])


def fill_memory_alike(one: Node, other: Node | Draft) -> bool:
    """Whether both fill their memory in the same order, so that a node may read either of them by its strides."""
    is_whole = all(_is_whole(value_of(part)) for part in (one, other))
    return is_whole and _strides_and_offset(one) == _strides_and_offset(other)


def _is_whole(value: torch.Tensor) -> bool:
    return statically_known_true(value.numel() * value.dtype.itemsize == value.untyped_storage().nbytes())


def _strides_and_offset(part: Node | Draft) -> tuple[list[Size], Size]:
    value = value_of(part)
    return [size_of(stride) for stride in value.stride()], size_of(value.storage_offset())


def _slowest_first(strides: Sequence[Size]) -> list[int]:
    """Dimensions by descending stride, in their own order where strides are equal."""

    def compare(one: int, two: int) -> int:
        if strides[one] == strides[two]:
            return one - two
        return 1 if at_most(strides[one], strides[two]) else -1

    return sorted(range(len(strides)), key=functools.cmp_to_key(compare))
