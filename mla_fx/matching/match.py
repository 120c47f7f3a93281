"""What a pattern bound, which axes turned out to be the same, and how far an attempt came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import label_of
from mla_fx.readings.axes import Axes, Axis, Index, axes, cuts, digits_of, of_axis, slowest_first, substitute
from mla_fx.readings.element import Element
from mla_fx.readings.reading import Reading, renamed
from mla_fx.readings.same_value import equal_calls
from mla_fx.readings.sizes import product

Same = Mapping[Axis, Index]
Kind = TypeVar("Kind", bound=Reading)


@dataclass(frozen=True)
class OperandAxes(Reading):
    """The axes of an operand, one index per dimension."""

    dims: tuple[Index, ...]


@dataclass(frozen=True)
class Match:
    """Elements by variable, readings by name, alternatives by tag.

    A name that is bound twice is one tensor, read at equal indices. An axis of one reading may equal an axis of
    another, for example the two that two products are summed over, but no `fixed` axis equals another. `same` maps each
    axis to what it equals."""

    elements: Mapping[str, Element] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    same: Same = field(default_factory=dict)
    fixed: frozenset[Axis] = frozenset()

    @property
    def depth(self) -> int:
        return len(self.elements) + len(self.readings)

    @property
    def nodes(self) -> set[Node]:
        """The operations that compute what was bound or read, and the nodes that the program reads them from."""
        parts = (element for reading in self.readings.values() for element in reading.elements)
        found = {node for element in (*self.elements.values(), *parts) for node in (element.origin, element.seen[0])}
        return found | {reading.node for reading in self.readings.values()}

    def bind(self, name: str, element: Element) -> Match:
        before = self.elements.get(name)
        if before is None:
            return replace(self, elements={**self.elements, name: element})
        if not equal_calls(before.origin, element.origin):
            places = f"{label_of(before.origin)} in one place and {label_of(element.origin)} in another"
            raise NoMatch(f"{name} is not one tensor: {places}", element.origin)
        same = self._as_one(before, element)
        if same is None:
            raise NoMatch(f"{name} is read in two different ways", element.origin)
        return replace(self, same=same)

    def read(self, name: str, reading: Reading) -> Match:
        """Keep a reading. If a pattern occurs twice, the first is kept, and the second must agree with it."""
        before = self.readings.get(name)
        if before is None:
            return replace(self, readings={**self.readings, name: reading})
        if before.constants != reading.constants:
            raise NoMatch(f"{name} is computed in two different ways", reading.node)
        return self

    def choose(self, tag: str, choice: str) -> Match:
        return replace(self, choices={**self.choices, tag: choice})

    def reading(self, kind: type[Kind], name: str) -> Kind:
        found = self.readings[name]
        assert isinstance(found, kind), f"{name} names a {kind.__name__} in every pattern that has it"
        return found

    def get(self, kind: type[Kind], name: str) -> Kind | None:
        """The reading of a name, if the chosen alternatives have it."""
        return self.reading(kind, name) if name in self.readings else None

    def roles(self, operand: str) -> tuple[Axes, ...]:
        """The axes of each dimension of an operand of the call."""
        found = self.reading(OperandAxes, f"{operand}.axes")
        return tuple(axes(part, operand, found.node) for part in found.dims)

    def __getitem__(self, name: str) -> Element:
        return self.elements[name]

    def settled(self) -> Match:
        """The match with one name per axis, and every axis split wherever something reads only part of it.

        Raises NoMatch if two axes of one reading became one, such as the dimension that a product sums over and one
        that it keeps, or if two readings split one axis in incompatible ways."""
        for reading in self.readings.values():
            if not _keep_apart(_axes_of(reading.scope), self.same):
                raise NoMatch("one dimension is used as two", reading.node)
        elements = (index for element in self.elements.values() for index in element.indices)
        readings = (index for reading in self.readings.values() for index in reading.indices)
        read = dict.fromkeys((*elements, *readings))  # most indices occur more than once
        parted = cuts(index for index in (substitute(part, self.same) for part in read) if index)
        if parted is None:
            raise NoMatch("two readings split one dimension in incompatible ways")
        names = {**parted, **{axis: substitute(place, parted) or place for axis, place in self.same.items()}}
        if not names:
            return self
        return replace(
            self,
            elements={name: renamed(element, names) for name, element in self.elements.items()},
            readings={name: renamed(reading, names) for name, reading in self.readings.items()},
        )

    # --- one element twice ---------------------------------------------------------------------------------------

    def _as_one(self, one: Element, other: Element) -> Same | None:
        """The axes that must be the same for two elements of one operation to be equal, with their scales; None if they
        differ."""
        if (one.factor, one.roundings) != (other.factor, other.roundings):
            return None
        same = self._unified(one, other)
        if one.scales is None or other.scales is None:
            return same if one.scales is other.scales else None
        mine, theirs = one.scales, other.scales
        if mine.dtype != theirs.dtype or len(mine.by) != len(theirs.by):
            return None
        for left, right in zip(mine.by, theirs.by, strict=True):
            if not equal_calls(left.origin, right.origin):
                return None
            same = None if same is None else replace(self, same=same)._as_one(left, right)
        return same

    def _unified(self, one: Element, other: Element) -> Same | None:
        """The axes that must be the same for two elements to be one; None if they are not."""
        same = self._parted(one, other)
        for mine, theirs in zip(one.index, other.index, strict=True):
            same = None if same is None else self._equated(mine, theirs, same)
        is_kept = same is not None and all(_keep_apart(element.axes, same) for element in (one, other))
        return same if is_kept else None

    def _parted(self, one: Element, other: Element) -> Same | None:
        """`same`, with every axis that may equal another split where either element reads only part of it."""
        indices = [substitute(part, self.same) for part in (*one.index, *other.index)]
        found = cuts(index for index in indices if index is not None)
        if found is None:
            return None
        same = self.same
        for axis, composite in found.items():
            same = same if axis in self.fixed else _extended(same, axis, composite)
        return same

    def _equated(self, mine: Index, theirs: Index, same: Same) -> Same | None:
        left, right = substitute(mine, same), substitute(theirs, same)
        if left is None or right is None or left == right:
            return same if left == right and left is not None else None
        for axis, stands_for in ((right.axis, left), (left.axis, right)):
            if axis is not None and self._may_stand_for(axis, stands_for):
                return _extended(same, axis, stands_for)
        return self._equated_by_term(left, right, same)

    def _equated_by_term(self, left: Index, right: Index, same: Same) -> Same | None:
        """If both read several axes, those with equal strides are the same, one by one."""
        mine, theirs = slowest_first(left.terms), slowest_first(right.terms)
        if mine is None or theirs is None or left.offset != right.offset or len(mine) != len(theirs):
            return None
        for (digit, _), (other, _) in zip(mine, theirs, strict=True):
            if digit.axis is other.axis:
                continue
            pairs = ((other.axis, digit.axis), (digit.axis, other.axis))
            pair = next((pair for pair in pairs if self._may_stand_for(pair[0], of_axis(pair[1]))), None)
            if pair is None:
                return None
            same = _extended(same, pair[0], of_axis(pair[1]))
            left, right = substitute(left, same) or left, substitute(right, same) or right
        return same if left == right else None

    def _may_stand_for(self, axis: Axis, index: Index) -> bool:
        digits = digits_of(index)
        if axis in self.fixed or axis in index.axes or digits is None:
            return False
        return bool(product(digit.size for digit in digits) == axis.size)


@dataclass
class NearestMiss:
    """The deepest point at which an attempt at a pattern failed, or the deepest whose reason is certain."""

    depth: int = -1
    miss: NoMatch | None = None
    is_certain: bool = False

    def fail(self, match: Match, miss: NoMatch, *, is_certain: bool = False) -> None:
        if (is_certain, match.depth) > (self.is_certain, self.depth):
            self.depth, self.miss, self.is_certain = match.depth, miss, is_certain


def _extended(same: Same, axis: Axis, index: Index) -> Same:
    earlier = {other: substitute(place, {axis: index}) or place for other, place in same.items()}
    return {**earlier, axis: index}


def _axes_of(indices: Iterable[Index]) -> set[Axis]:
    return {digit.axis for index in indices for digit, _ in index.terms}


def _keep_apart(apart: Iterable[Axis], same: Same) -> bool:
    """Whether no two of these axes became one."""
    images = [substitute(of_axis(axis), same) for axis in apart]
    digits = [digit for image in images if image is not None for digit in image.digits]
    if len({digit.axis for digit in digits}) == len(digits):
        return True
    return not any(one.overlaps(other) for place, one in enumerate(digits) for other in digits[:place])
