"""The pattern language: dataflow over canonical readings, matched with backtracking.

A pattern is a value built from the words below and says what an element must be computed from. Matching yields *every*
way to satisfy it, so a choice that fails later is taken back; what fails deepest is kept as the nearest miss.

    var("x")                         any element, bound to a name; the same name again means the same tensor
    bound("q", pattern)              the same, for an element that must also satisfy a pattern
    contract(a, b, name="uq")        a matrix product of a and b, in either order
    rms_norm(value, gamma, name=..)  a weighted RMSNorm
    rope(value, name=.., along=..)   a rotation along the dimension that `along` finds in the match
    stored(row, name=..)             rows that enter a cache, or rows that are used as they are
    either("tag", a=.., b=..)        alternatives; which one matched is kept under the tag
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from .canonical.axes import Axis, Index
from .canonical.cache_update import POSITIONED, cache_update
from .canonical.contraction import Contraction, contraction
from .canonical.element import Element, resolve
from .canonical.rms_norm import rms_norm as read_rms_norm
from .canonical.rope import rope as read_rope
from .canonical.softmax import Attention
from .canonical.views import fresh_index
from .errors import NoMatch


@dataclass(frozen=True)
class Match:
    """What a pattern bound: elements by variable, readings by name, alternatives by tag."""

    elements: Mapping[str, Element] = field(default_factory=dict)
    readings: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return len(self.elements) + len(self.readings)

    @property
    def nodes(self) -> list[Node]:
        """The operations that the match was read from, in graph order."""
        found = {element.node for element in self.elements.values()}
        found |= {
            reading.node for reading in self.readings.values() if isinstance(getattr(reading, "node", None), Node)
        }
        return sorted(node for node in found if node.op == "call_function")

    def bind(self, name: str, element: Element) -> Match:
        bound = self.elements.get(name)
        if bound is None:
            return replace(self, elements={**self.elements, name: element})
        if bound.node is not element.node:
            places = f"{bound.node.name} in one place, {element.node.name} in the other"
            raise NoMatch(f"{name} is not one tensor: {places}", element.node)
        if not alike(bound, element):
            raise NoMatch(f"{name} is read in two different ways", element.node)
        return self

    def read(self, name: str, reading: Any) -> Match:
        """Keeps a reading; a pattern that occurs twice keeps its first, with which the second must agree."""
        before = self.readings.get(name)
        if before is not None:
            if _constants(before) != _constants(reading):
                raise NoMatch(f"{name} is computed in two different ways", getattr(reading, "node", None))
            return self
        return replace(self, readings={**self.readings, name: reading})

    def choose(self, tag: str, choice: str) -> Match:
        return replace(self, choices={**self.choices, tag: choice})

    def __getitem__(self, name: str) -> Element:
        return self.elements[name].settled()


def _constants(reading: Any) -> tuple[Any, ...]:
    """The numbers of a reading: what two readings of one computation have in common."""
    names = ("scale", "epsilon", "gamma_after_cast", "layout")
    return tuple(getattr(reading, name, None) for name in names)


def alike(left: Element, right: Element) -> bool:
    """One tensor read twice: the indices agree but for the names of axes, and axes in both keep their place."""
    left, right = left.settled(), right.settled()
    renamed: dict[Axis, Axis] = {}
    for mine, theirs in zip(left.index, right.index, strict=True):
        if mine.offset != theirs.offset or len(mine.terms) != len(theirs.terms):
            return False
        ordered = (sorted(part.terms, key=lambda term: (str(term[1]), str(term[0].size))) for part in (mine, theirs))
        for (axis, stride), (other, other_stride) in zip(*ordered, strict=True):
            if stride != other_stride or axis.size != other.size or renamed.setdefault(axis, other) is not other:
                return False
    shared = left.axes & right.axes
    return left.scale == right.scale and all(renamed[axis] is axis for axis in shared)


@dataclass
class Trail:
    """The deepest point at which one attempt at a pattern failed."""

    depth: int = -1
    miss: NoMatch | None = None

    def fail(self, match: Match, miss: NoMatch) -> None:
        if match.depth > self.depth:
            self.depth, self.miss = match.depth, miss


class Pattern:
    """What an element must be computed from."""

    def bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        """Every way in which `element` satisfies the pattern, extending `match`."""
        try:
            yield from self._bindings(element, match, trail)
        except NoMatch as miss:
            trail.fail(match, miss)

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        raise NotImplementedError


@dataclass(frozen=True)
class _Var(Pattern):
    name: str

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        yield match.bind(self.name, element)


@dataclass(frozen=True)
class _Bound(Pattern):
    name: str
    pattern: Pattern

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        yield from self.pattern.bindings(element, match.bind(self.name, element), trail)


@dataclass(frozen=True)
class _Either(Pattern):
    tag: str
    alternatives: Mapping[str, Pattern]

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        taken = match.choices.get(self.tag)
        for choice, pattern in self.alternatives.items():
            if taken in (None, choice):  # an alternative that occurs twice is the same in both places
                yield from pattern.bindings(element, match.choose(self.tag, choice), trail)


@dataclass(frozen=True)
class _Contract(Pattern):
    left: Pattern
    right: Pattern
    name: str

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        yield from self.products(contraction(element), match, trail)

    def products(self, found: Contraction, match: Match, trail: Trail) -> Iterator[Match]:
        """The same for a product that was read already."""
        match = match.read(self.name, found)
        for first, second in ((found.left, found.right), (found.right, found.left)):
            for half in self.left.bindings(first, match, trail):
                yield from self.right.bindings(second, half, trail)


@dataclass(frozen=True)
class _RmsNorm(Pattern):
    value: Pattern
    gamma: Pattern
    name: str

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        norm = read_rms_norm(element)
        for half in self.gamma.bindings(norm.gamma, match.read(self.name, norm), trail):
            yield from self.value.bindings(norm.value, half, trail)


@dataclass(frozen=True)
class _Rope(Pattern):
    value: Pattern
    name: str
    along: Callable[[Match], Index]

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        for rotation in read_rope(element, self.along(match)):
            yield from self.value.bindings(rotation.value, match.read(self.name, rotation), trail)


@dataclass(frozen=True)
class _Stored(Pattern):
    row: Pattern
    name: str

    def _bindings(self, element: Element, match: Match, trail: Trail) -> Iterator[Match]:
        try:
            update = cache_update(element)
        except NoMatch:
            if element.node.target in POSITIONED:
                raise  # it is a cache, written in a way that is not known
            yield from self.row.bindings(element, match.choose(self.name, "none").read(self.name, None), trail)
            return
        written = match.choose(self.name, "append" if update.position is None else "write").read(self.name, update)
        yield from self.row.bindings(update.row, written, trail)


def var(name: str) -> Pattern:
    return _Var(name)


def bound(name: str, pattern: Pattern) -> Pattern:
    return _Bound(name, pattern)


def either(tag: str, **alternatives: Pattern) -> Pattern:
    return _Either(tag, alternatives)


def contract(left: Pattern, right: Pattern, name: str) -> _Contract:
    return _Contract(left, right, name)


def rms_norm(value: Pattern, gamma: Pattern, name: str) -> Pattern:
    return _RmsNorm(value, gamma, name)


def rope(value: Pattern, name: str, along: Callable[[Match], Index]) -> Pattern:
    return _Rope(value, name, along)


def stored(row: Pattern, name: str) -> Pattern:
    return _Stored(row, name)


# --- roots: what a rule starts from ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionPattern:
    """Softmax attention whose scores are a sum of products, each matched by one pattern."""

    scores: tuple[Pattern, ...]
    value: Pattern

    def bindings(self, found: Attention, products: tuple[Contraction, ...], trail: Trail) -> Iterator[Match]:
        match = Match().read("attention", found)
        if len(products) != len(self.scores):
            what = (
                "one product of query and key" if len(products) == 1 else f"{len(products)} products of query and key"
            )
            trail.fail(match, NoMatch(f"the scores are {what}, not a nope and a rope part", found.node))
            return
        for order in itertools.permutations(products):
            for scored in self._scores(order, match, trail):
                yield from self.value.bindings(found.value, scored, trail)

    def _scores(self, products: tuple[Contraction, ...], match: Match, trail: Trail) -> Iterator[Match]:
        partial: Iterator[Match] = iter((match,))
        for pattern, product in zip(self.scores, products, strict=True):
            partial = self._each(pattern, product, partial, trail)
        return partial

    def _each(self, pattern: Pattern, product: Contraction, before: Iterator[Match], trail: Trail) -> Iterator[Match]:
        for match in before:
            yield from _product_bindings(pattern, product, match, trail)


def _product_bindings(pattern: Pattern, product: Contraction, match: Match, trail: Trail) -> Iterator[Match]:
    if isinstance(pattern, _Either):
        for choice, alternative in pattern.alternatives.items():
            yield from _product_bindings(alternative, product, match.choose(pattern.tag, choice), trail)
        return
    assert isinstance(pattern, _Contract), "a score is a product"
    try:
        yield from pattern.products(product, match, trail)
    except NoMatch as miss:
        trail.fail(match, miss)


@dataclass(frozen=True)
class CallPattern:
    """The operands of an operator call, by argument name. Each operand's axes are bound as `<name>.axes`."""

    operands: Mapping[str, Pattern] = field(default_factory=dict)

    def bindings(self, node: Node, arguments: Mapping[str, Node], trail: Trail) -> Iterator[Match]:
        partial: Iterator[Match] = iter((Match(),))
        for name, pattern in self.operands.items():
            partial = self._each(name, pattern, arguments[name], partial, trail)
        return partial

    def _each(
        self, name: str, pattern: Pattern, argument: Node, before: Iterator[Match], trail: Trail
    ) -> Iterator[Match]:
        for match in before:
            index = fresh_index(argument)
            yield from pattern.bindings(resolve(argument, index), match.read(f"{name}.axes", index), trail)
