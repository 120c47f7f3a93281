"""What a pattern bound, which axes turned out to be the same, and how far an attempt came."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import label_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import (
    Axes,
    Axis,
    Index,
    axes,
    axes_of,
    digits_of,
    of_axis,
    ordered,
    slowest_first,
    substitute,
    without_digits,
)
from mla_fx.readings.contraction import Contraction, check_one_product
from mla_fx.readings.element import Element
from mla_fx.readings.paged import Paged
from mla_fx.readings.reading import Reading, renamed
from mla_fx.readings.same_value import equal_calls
from mla_fx.readings.sizes import product
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.plan import Call, Expression, Plan, Replacement, result
from mla_fx.rewriting.replacement import replacing

Same = Mapping[Axis, Index]
Kind = TypeVar("Kind", bound=Reading)


@dataclass(frozen=True)
class OperandAxes(Reading):
    """The axes of an operand, one index per dimension, and their letters."""

    dims: tuple[Index, ...]
    letters: str


@dataclass(frozen=True)
class Match:
    """Elements by variable, readings by name, alternatives by tag.

    A name that is bound twice is one tensor, read at equal indices. An axis of one reading may equal an axis of
    another, for example the two that two products are summed over, but no `fixed` axis equals another. `same` maps each
    axis to what it equals.

    `letters` names the axes of elements, and what products are summed over or blocks counted by, as their patterns do:
    a letter is the same axes everywhere."""

    elements: Mapping[str, Element] = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    same: Same = field(default_factory=dict)
    fixed: frozenset[Axis] = frozenset()
    letters: Mapping[str, str] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return len(self.elements) + len(self.readings)

    def bind(self, name: str, element: Element, letters: str = "") -> Match:
        before = self.elements.get(name)
        if before is None:
            return replace(self, elements={**self.elements, name: element}, letters=self._named_by(name, letters))
        same = self._as_one(before, element) if equal_calls(before.origin, element.origin) else None
        if same is not None:
            return replace(self, same=same)
        for value in (before, element):  # either may be expanded from the latent
            check_one_product(value)
        if not equal_calls(before.origin, element.origin):
            places = f"{label_of(before.origin)} in one place and {label_of(element.origin)} in another"
            raise NoMatch(f"{name} is not one tensor: {places}", element.origin)
        raise NoMatch(f"{name} is read in two different ways", element.origin)

    def read(self, name: str, reading: Reading, letters: str = "") -> Match:
        """Keep a reading. If a pattern occurs twice, the first is kept, and the second must agree with it."""
        before = self.readings.get(name)
        if before is None:
            return replace(self, readings={**self.readings, name: reading}, letters=self._named_by(name, letters))
        if before.constants != reading.constants:
            raise NoMatch(f"{name} is computed in two different ways", reading.node)
        return self

    def _named_by(self, name: str, letters: str) -> Mapping[str, str]:
        return {**self.letters, name: letters.replace(" ", "")} if letters else self.letters

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
        """The axes of each dimension of a root."""
        return tuple(map(self.axes, self.reading(OperandAxes, f"{operand}.axes").letters))

    def __getitem__(self, name: str) -> Element:
        return self.elements[name]

    def settled(self) -> Match:
        """The match with one name per axis, and every axis split wherever something reads only part of it.

        Raises NoMatch if two axes of one reading became one, such as the dimension that a product sums over and one
        that it keeps, or if two readings split one axis in incompatible ways."""
        for reading in self.readings.values():
            if not _keep_apart({digit.axis for index in reading.scope for digit, _ in index.terms}, self.same):
                raise NoMatch("one dimension is used as two", reading.node)
        elements = (index for element in self.elements.values() for index in element.indices)
        readings = (index for reading in self.readings.values() for index in reading.indices)
        read = dict.fromkeys((*elements, *readings))  # most indices occur more than once
        parted = without_digits(index for index in (substitute(part, self.same) for part in read) if index)
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

    # --- axes by their letters -----------------------------------------------------------------------------------

    def axes(self, letters: str) -> Axes:
        """The axes that letters name, in order; "1" names none.

        A letter is a dimension of a root, or what a product is summed over or blocks are counted by. Any other is what
        is left of the first operand with all other letters known. Raises NoMatch if there is no such operand."""
        return tuple(axis for letter in letters if letter != "1" for axis in self._named(letter))

    def dims(self, letters: str) -> tuple[Axes, ...]:
        """The axes of dimensions: "b nv 1" has the dimension b, one over n and v, and one of one element."""
        return tuple(map(self.axes, letters.split()))

    def tensor(self, name: str, letters: str, **options: Any) -> Expression:
        """An element as an operand with these dimensions. The options are those of `tensor`."""
        return tensor(self[name], self.dims(letters), **options)

    def replacing(self, new: Expression, letters: str) -> Replacement:
        """Replace the value that a ValuePattern matched by one with these dimensions."""
        value = self.reading(OperandAxes, "value.axes")
        return replacing(value.node, value.dims, result(new, self.dims(letters)))

    def plan(self, target: OpOverload, letters: str, **operands: str) -> Plan:
        """Replace that value by the result of a call. Its arguments are the operands in order, each with its
        dimensions."""
        arguments = (self.tensor(name, dims) for name, dims in operands.items())
        return Plan(self.replacing(Call(target, *arguments), letters))

    def _named(self, letter: str) -> Axes:
        if letter in self._roots:
            return axes(*self._roots[letter])
        if letter in self._inner:
            return self._inner[letter]
        stuck = next(((name, letters) for name, letters, _ in self._operands if letter in letters), None)
        if stuck is None:
            raise NoMatch(f"nothing that matched has a dimension {letter}")
        both = " and ".join(one for one in stuck[1] if one not in self._roots and one not in self._inner)
        raise NoMatch(f"{both} of {stuck[0]} cannot be told apart: no operand has one of them alone")

    @functools.cached_property
    def _roots(self) -> dict[str, tuple[Index, str, Node]]:
        """The index of each letter of a root, and what it is for a refusal."""
        found: dict[str, tuple[Index, str, Node]] = {}
        for name, reading in self.readings.items():
            if isinstance(reading, Attention):
                found["t"] = reading.keys, "the context", reading.node
            elif isinstance(reading, OperandAxes):
                for letter, part in zip(reading.letters, reading.dims, strict=True):
                    found.setdefault(letter, (part, name.removesuffix(".axes"), reading.node))
        return found

    @functools.cached_property
    def _inner(self) -> dict[str, Axes]:
        """The axes of all letters that are no dimensions of a root, as far as they can be told apart."""
        known = {"1": frozenset[Axis](), **{letter: part.axes for letter, (part, *_) in self._roots.items()}}
        found: dict[str, Axes] = {}
        for name, letter in self.letters.items():
            if isinstance(over := self.readings.get(name), (Contraction, Paged)) and letter not in known:
                known[letter], found[letter] = frozenset(over.axes), over.axes
        operands = self._operands
        outer = tuple(operands[0][2]) if "attention" in self.readings else ()
        while True:
            left = (([letter for letter in letters if letter not in known], own) for _, letters, own in operands)
            (letter,), own = next(((letters, own) for letters, own in left if len(letters) == 1), ("1", ()))
            if letter in known:
                return found
            known[letter] = frozenset(own).difference(*known.values())
            found[letter] = ordered(known[letter], outer)

    @property
    def _operands(self) -> Sequence[tuple[str, str, Iterable[Axis]]]:
        """What has letters, and its axes: an attention's output, elements in the order of binding, and masks."""
        bound = [(name, self.letters[name], self[name].axes) for name in self.letters if name in self.elements]
        found = self.get(Attention, "attention")
        if found is None:
            return bound
        outer = [axis for part in found.index for axis in axes_of(part) or ()]
        masked = [axis for mask in found.masks for axis in mask.element.axes]
        masked += found.causal.rows.axes if found.causal is not None else ()
        return [("the attention's output", "bsnv", outer), *bound, ("the masks", "bst", masked)]

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
        found = without_digits(index for index in indices if index is not None)
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


def _keep_apart(apart: Iterable[Axis], same: Same) -> bool:
    """Whether no two of these axes became one."""
    images = [substitute(of_axis(axis), same) for axis in apart]
    digits = [digit for image in images if image is not None for digit in image.digits]
    if len({digit.axis for digit in digits}) == len(digits):
        return True
    return not any(one.overlaps(other) for place, one in enumerate(digits) for other in digits[:place])
