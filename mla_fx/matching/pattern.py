"""The pattern language: dataflow over readings, matched with backtracking.

A pattern is a value built from the words below. It says what an element must be computed from. Matching yields *every*
way to satisfy it, so a choice that fails later is taken back. The deepest failure is kept as the nearest miss.

var("x")                         any element, bound to a name; the same name again means the same tensor
bound("q", pattern)              the same, for an element that also satisfies a pattern, which is matched once
contract(a, b, name="uq")        a matrix product of a and b, in either order
quantised(a, b, name="up")       the same, also of codes that carry their scales
tokens(value, name="cq.codes")   the codes of a value that the program quantises, with a scale for each token
coded(value, name="codes")       the codes of a value in int8, with a scale that is given
rms_norm(value, gamma, name=..)  a weighted RMSNorm
scaled(value, scale, name=..)    a value multiplied by a smaller tensor
gathered(pages, table, name=..)  rows of pages in a table, in the dtype of the pages or a wider one, or dequantised
rope(value, name=.., along=..)   a rotation along the axis that `along` finds in the match
stored(row, name=..)             rows that enter a cache, or rows that are used directly; with `beside`, the same rows
                                 as those of another cache, token for token
behind(pattern)                  a value computed from one written cache, such as latents that are quantised whenever
                                 they are read; the cache satisfies a pattern
either("tag", a=.., b=..)        alternatives; the one that matched is kept under the tag
having(pattern)                  a tensor joined from several; one of them satisfies a pattern
refused(pattern, because)        a near miss, refused for a reason that comes before all others

A match starts from a root, which gives the words their first elements:

AttentionPattern(scores, value)  softmax attention whose logits are a sum of products, and its values
CallPattern({name: Operand(letters, pattern)})
                                 an operator's operands, with a letter per dimension: one letter, one axis
ValuePattern(pattern, rank)      what a node computes

`name` keeps a reading for the rule: `match.reading(RmsNorm, "norm")`. A new word is a reader of a `Reading` and a call
of `_Reads`, which matches the reading's parts in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Axis, Index, extent, fresh, shifted
from mla_fx.readings.cache_update import POSITIONED, WRITES, cache_updates, is_written_where
from mla_fx.readings.calls import named_argument
from mla_fx.readings.contraction import Contraction, contraction
from mla_fx.readings.element import Element, element_of, is_parameter, resolve
from mla_fx.readings.fractals import element_of_rows, sizes_of_rows
from mla_fx.readings.new_rows import is_cached
from mla_fx.readings.paged import paged_numbers
from mla_fx.readings.quantised_cache import cache_behind
from mla_fx.readings.quantised_product import quantised_product
from mla_fx.readings.quantised_tokens import quantised_tokens
from mla_fx.readings.reading import Reading
from mla_fx.readings.rms_norm import rms_norm as read_rms_norm
from mla_fx.readings.rope import rope as read_rope
from mla_fx.readings.scaling import scaling
from mla_fx.readings.static_codes import static_codes
from mla_fx.readings.unproved import EQUAL, unproved
from mla_fx.readings.views import cuts, fresh_index

from .match import Match, NearestMiss


class Pattern:
    """What an element must be computed from."""

    def bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which `element` satisfies the pattern, extending `match`."""
        try:
            yield from self._bindings(element, match, nearest)
        except NoMatch as miss:
            nearest.fail(match, miss)

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        raise NotImplementedError


@dataclass(frozen=True)
class _Var(Pattern):
    name: str

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        yield match.bind(self.name, element)


@dataclass(frozen=True)
class _Bound(Pattern):
    name: str
    pattern: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        before = match.elements.get(self.name)
        if before is not None and before.origin is element.origin:
            yield match.bind(self.name, element)
        elif before is not None:
            yield from self.pattern.bindings(element, match, nearest)  # computed a second time: matched a second time
        else:
            yield from self.pattern.bindings(element, match.bind(self.name, element), nearest)


@dataclass(frozen=True)
class _Either(Pattern):
    tag: str
    alternatives: Mapping[str, Pattern]

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        for pattern, chosen in self.chosen(match):
            yield from pattern.bindings(element, chosen, nearest)

    def chosen(self, match: Match) -> Iterator[tuple[Pattern, Match]]:
        """The alternatives, each with the match that has chosen it; an earlier choice holds in both places."""
        taken = match.choices.get(self.tag)
        for choice, pattern in self.alternatives.items():
            if taken in (None, choice):
                yield pattern, match.choose(self.tag, choice)


@dataclass(frozen=True)
class _Refused(Pattern):
    pattern: Pattern
    because: str

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        for found in self.pattern.bindings(element, match, nearest):
            nearest.fail(found, NoMatch(self.because, element.origin), is_certain=True)
        yield from ()


@dataclass(frozen=True)
class _Having(Pattern):
    part: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        seams = cuts(element.origin, element.index)
        for axis in dict.fromkeys(axis for axis, _ in seams):
            bounds = [0, *sorted(cut for at, cut in seams if at is axis), axis.size]
            for start, stop in itertools.pairwise(bounds):
                part = element.at({axis: shifted(fresh(stop - start), start)})
                yield from self.part.bindings(part, match, nearest)


@dataclass(frozen=True)
class _Reads(Pattern):
    """An element that `reader` reads, in each way that it yields; the parts of the reading satisfy patterns in turn."""

    name: str
    reader: Callable[[Element, Match], Iterable[Reading]]
    parts: Mapping[str, Pattern]

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        for reading in self.reader(element, match):
            yield from self.within(reading, match, nearest)

    def within(self, reading: Reading, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        """The same for a reading that already exists."""
        try:
            partial: Iterator[Match] = iter((match.read(self.name, reading),))
        except NoMatch as miss:
            return nearest.fail(match, miss)
        for part, pattern in self.parts.items():
            partial = _each(pattern, getattr(reading, part), partial, nearest)
        yield from partial


@dataclass(frozen=True)
class _Codes(_Reads):
    """Codes that the program computes. If an element must be codes, what is wrong with them comes before all else; no
    other element misses this pattern."""

    must_be: Callable[[Element], bool]

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        try:
            readings = [*self.reader(element, match)]
        except NoMatch as miss:
            return nearest.fail(match, miss, is_certain=True) if self.must_be(element) else None
        for reading in readings:
            yield from self.within(reading, match, nearest)


def _each(pattern: Pattern, element: Element, before: Iterator[Match], nearest: NearestMiss) -> Iterator[Match]:
    for match in before:
        yield from pattern.bindings(element, match, nearest)


@dataclass(frozen=True)
class _Stored(Pattern):
    row: Pattern
    name: str
    beside: str

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        try:
            updates = [*cache_updates(element)]
        except NoMatch as miss:
            if element.origin.target in POSITIONED or is_written_where(element.origin):
                raise  # a cache write in an unknown spelling is not a plain row
            if element.origin.target in WRITES and is_cached(element):
                nearest.fail(match, miss)
            yield from self.row.bindings(element, match.choose(self.name, "none"), nearest)
            return
        other = match.readings.get(self.beside)
        for update in updates:
            try:
                found = update.beside(other)
            except NoMatch as miss:
                nearest.fail(match, miss)
                continue
            written = match.choose(self.name, "append" if found.is_appended else "write").read(self.name, found)
            yield from self.row.bindings(found.row, written, nearest)


@dataclass(frozen=True)
class _Behind(Pattern):
    pattern: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        cache = cache_behind(element.origin)
        if cache is not None:
            yield from self.pattern.bindings(element_of(cache), match, nearest)


def var(name: str) -> Pattern:
    return _Var(name)


def bound(name: str, pattern: Pattern) -> Pattern:
    return _Bound(name, pattern)


def either(tag: str, **alternatives: Pattern) -> Pattern:
    return _Either(tag, alternatives)


def having(part: Pattern) -> Pattern:
    return _Having(part)


def refused(pattern: Pattern, because: str) -> Pattern:
    return _Refused(pattern, because)


def contract(left: Pattern, right: Pattern, name: str) -> Pattern:
    return _Reads(name, lambda element, _: _both_ways(contraction(element)), {"left": left, "right": right})


def quantised(left: Pattern, right: Pattern, name: str) -> Pattern:
    return _Reads(name, lambda element, _: _both_ways(quantised_product(element)), {"left": left, "right": right})


def tokens(value: Pattern, name: str) -> Pattern:
    def must_be(element: Element) -> bool:
        return element.scales is not None and not is_parameter(element.origin)

    return _Codes(name, lambda element, _: (quantised_tokens(element),), {"value": value}, must_be)


def coded(value: Pattern, name: str) -> Pattern:
    return _Codes(name, lambda element, _: static_codes(element), {"value": value}, lambda one: one.dtype.itemsize == 1)


def rms_norm(value: Pattern, gamma: Pattern, name: str) -> Pattern:
    return _Reads(name, lambda element, _: (read_rms_norm(element),), {"gamma": gamma, "value": value})


def scaled(value: Pattern, scale: Pattern, name: str) -> Pattern:
    return _Reads(name, lambda element, _: (scaling(element),), {"value": value, "scale": scale})


def gathered(pages: Pattern, table: Pattern, name: str) -> Pattern:
    return _Reads(name, lambda element, _: (paged_numbers(element),), {"pages": pages, "table": table})


def rope(value: Pattern, name: str, along: Callable[[Match], Axis]) -> Pattern:
    return _Reads(name, lambda element, match: read_rope(element, along(match)), {"value": value})


def stored(row: Pattern, name: str, beside: str = "") -> Pattern:
    return _Stored(row, name, beside)


def behind(pattern: Pattern) -> Pattern:
    return _Behind(pattern)


def _both_ways(found: Contraction) -> Iterator[Contraction]:
    return iter((found, found.swapped))


# --- roots: what a rule starts from ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionPattern:
    """Softmax attention whose scores are a sum of products, each matched by one pattern."""

    scores: tuple[Pattern, ...]
    value: Pattern

    def bindings(self, found: Attention, products: tuple[Contraction, ...], nearest: NearestMiss) -> Iterator[Match]:
        fixed = frozenset(axis for part in (*found.index, found.keys) for axis in part.axes)
        match = Match(fixed=fixed).read("attention", found)
        if len(products) != len(self.scores):
            what = "one product" if len(products) == 1 else f"{len(products)} products"
            wanted = "one" if len(self.scores) == 1 else "a nope and a rope part"
            nearest.fail(match, NoMatch(f"the scores are {what} of query and key, not {wanted}", found.node))
            return
        for order in itertools.permutations(products):
            partial: Iterator[Match] = iter((match,))
            for pattern, product in zip(self.scores, order, strict=True):
                partial = _each_score(pattern, product, partial, nearest)
            yield from _each(self.value, found.value, partial, nearest)


def _each_score(
    pattern: Pattern, product: Contraction, before: Iterator[Match], nearest: NearestMiss
) -> Iterator[Match]:
    for match in before:
        if isinstance(pattern, _Either):
            for alternative, chosen in pattern.chosen(match):
                yield from _each_score(alternative, product, iter((chosen,)), nearest)
            continue
        assert isinstance(pattern, _Reads), "a score is a product"
        for way in _both_ways(product):
            yield from pattern.within(way, match, nearest)


@dataclass(frozen=True)
class OperandAxes(Reading):
    """The axes of an operand, one index per dimension."""

    dims: tuple[Index, ...]


@dataclass(frozen=True)
class Operand:
    """An operand of an operator call: a letter per dimension, and what it must be computed from."""

    letters: str
    pattern: Pattern


@dataclass(frozen=True)
class CallPattern:
    """The operands of an operator call, by argument name; a letter is the same axis everywhere.

    Each operand's axes are bound as `<name>.axes`. Axes in `fixed` equal no other axes of the match."""

    operands: Mapping[str, Operand] = field(default_factory=dict)
    fixed: str = ""

    def at(self, call: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which the operands of a call, by their names in its schema, satisfy their patterns."""
        arguments = {name: value for name in self.operands if isinstance(value := named_argument(call, name), Node)}
        if len(arguments) < len(self.operands):
            missing = next(name for name in self.operands if name not in arguments)
            return nearest.fail(Match(), NoMatch(f"{name_of(call)} is called without {missing}", call))
        yield from self.bindings(call, arguments, nearest)

    def bindings(self, node: Node, arguments: Mapping[str, Node], nearest: NearestMiss) -> Iterator[Match]:
        letters: dict[str, Index] = {}
        for name, operand in self.operands.items():
            for letter, size in zip(operand.letters, sizes_of_rows(arguments[name], len(operand.letters)), strict=True):
                found = extent(letters.setdefault(letter, fresh(size)))
                if found != size:  # the same number, but a proof for one is not a proof for the other
                    because = f"too little is known about the sizes of the operands of {name_of(node)}"
                    miss = NoMatch(because + unproved(node.graph, found, EQUAL, size), node)
                    nearest.fail(Match(), miss, is_certain=True)
        fixed = frozenset(axis for letter in self.fixed for axis in letters[letter].axes)
        partial: Iterator[Match] = iter((Match(fixed=fixed),))
        for name, operand in self.operands.items():
            dims = tuple(letters[letter] for letter in operand.letters)
            partial = _each_read(f"{name}.axes", OperandAxes(arguments[name], dims), partial)
            partial = _each(operand.pattern, element_of_rows(arguments[name], dims), partial, nearest)
        return partial


@dataclass(frozen=True)
class ValuePattern:
    """What a node with this rank computes. Its own axes are bound as `value.axes` and equal no others."""

    pattern: Pattern
    rank: int

    def at(self, node: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which the value of a node satisfies the pattern."""
        dims = fresh_index(node)
        if len(dims) != self.rank:
            return nearest.fail(Match(), NoMatch(f"expected {self.rank} dimensions, found {len(dims)}", node))
        fixed = frozenset(axis for dim in dims for axis in dim.axes)
        match = Match(fixed=fixed).read("value.axes", OperandAxes(node, dims))
        yield from self.pattern.bindings(resolve(node, dims), match, nearest)


def _each_read(name: str, reading: Reading, before: Iterator[Match]) -> Iterator[Match]:
    return (match.read(name, reading) for match in before)
