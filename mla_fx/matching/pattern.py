"""Patterns: what an element must be computed from, and the roots that a match starts from."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Index, extent, fresh, shifted
from mla_fx.readings.behind import cache_behind, is_cached
from mla_fx.readings.cache_places import element_of_rows, sizes_of_rows
from mla_fx.readings.cache_update import POSITIONED, WRITES, cache_updates, is_written_where
from mla_fx.readings.calls import named_argument
from mla_fx.readings.concatenation import own_part
from mla_fx.readings.contraction import Contraction
from mla_fx.readings.element import Element, element_of, is_parameter, resolve
from mla_fx.readings.equal_sizes import EQUAL, unproved
from mla_fx.readings.reading import Reading
from mla_fx.readings.views import fresh_index, seams

from .match import Match, NearestMiss, OperandAxes


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
class Var(Pattern):
    name: str
    letters: str = ""
    is_parameter: bool = False

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        if self.is_parameter and not is_parameter(element.origin):
            raise NoMatch(f"{self.name} is computed in the graph, expected a parameter", element.origin)
        yield match.bind(self.name, element, self.letters)


@dataclass(frozen=True)
class Bound(Pattern):
    name: str
    pattern: Pattern
    letters: str = ""

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        before = match.elements.get(self.name)
        if before is not None and before.origin is element.origin:
            yield match.bind(self.name, element)
        elif before is not None:
            yield from self.pattern.bindings(element, match, nearest)  # computed a second time: matched a second time
        else:
            yield from self.pattern.bindings(element, match.bind(self.name, element, self.letters), nearest)


@dataclass(frozen=True)
class Either(Pattern):
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
class Refused(Pattern):
    pattern: Pattern
    because: str

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        for found in self.pattern.bindings(element, match, nearest):
            nearest.fail(found, NoMatch(self.because, element.origin), is_certain=True)
        yield from ()


@dataclass(frozen=True)
class Having(Pattern):
    part: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        found = seams(element.origin, element.index)
        for axis in dict.fromkeys(axis for axis, _ in found):
            bounds = [0, *sorted(cut for at, cut in found if at is axis), axis.size]
            for start, stop in itertools.pairwise(bounds):
                part = element.at({axis: shifted(fresh(stop - start), start)})
                yield from self.part.bindings(part, match, nearest)


@dataclass(frozen=True)
class Reads(Pattern):
    """An element that `reader` reads, in each way that it yields; the parts of the reading satisfy patterns in turn."""

    name: str
    reader: Callable[[Element, Match], Iterable[Reading]]
    parts: Mapping[str, Pattern]
    over: str = field(default="", kw_only=True)

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        for reading in self.reader(element, match):
            yield from self.within(reading, match, nearest)

    def within(self, reading: Reading, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        """The same for a reading that already exists."""
        name = self.name or f"unnamed {len(match.readings)}"
        try:
            partial: Iterator[Match] = iter((match.read(name, reading, self.over),))
        except NoMatch as miss:
            return nearest.fail(match, miss)
        for part, pattern in self.parts.items():
            partial = _each(pattern, getattr(reading, part), partial, nearest)
        yield from partial


@dataclass(frozen=True)
class Codes(Reads):
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
class Stored(Pattern):
    row: Pattern
    name: str
    beside: str = ""

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
class Behind(Pattern):
    pattern: Pattern

    def _bindings(self, element: Element, match: Match, nearest: NearestMiss) -> Iterator[Match]:
        cache = cache_behind(element.origin)
        if cache is not None:
            yield from self.pattern.bindings(element_of(cache), match, nearest)


def both_ways(found: Contraction) -> Iterator[Contraction]:
    yield found
    yield found.swapped


# --- roots: what a rule starts from ------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionPattern:
    """Softmax attention whose scores are a sum of products, each matched by one pattern. Its letters are t for the
    context, and b, s, n and v for its output; its masks have b, s and t."""

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
        if isinstance(pattern, Either):
            for alternative, chosen in pattern.chosen(match):
                yield from _each_score(alternative, product, iter((chosen,)), nearest)
            continue
        assert isinstance(pattern, Reads), "a score is a product"
        for way in both_ways(product):
            yield from pattern.within(way, match, nearest)


@dataclass(frozen=True)
class Operand:
    """An operand of an operator call: a letter per dimension, and what it must be computed from, if it is given."""

    letters: str
    pattern: Pattern
    is_optional: bool = False


@dataclass(frozen=True)
class CallPattern:
    """The operands of an operator call, by argument name; a letter is the same axis everywhere.

    Each operand's axes are bound as `<name>.axes`. Axes in `fixed` equal no other axes of the match."""

    operands: Mapping[str, Operand] = field(default_factory=dict)
    fixed: str = ""

    def at(self, call: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which the operands of a call, by their names in its schema, satisfy their patterns. The
        call itself is bound as `call`. An operand that a group of processes gathers is the part of this process."""
        given = ((name, named_argument(call, name)) for name in self.operands)
        arguments = {name: own_part(value) for name, value in given if isinstance(value, Node)}
        for name, operand in self.operands.items():
            if name not in arguments and not operand.is_optional:
                return nearest.fail(Match(), NoMatch(f"{name_of(call)} is called without {name}", call))
        yield from _each_read("call", Reading(call), self.bindings(call, arguments, nearest))

    def bindings(self, node: Node, arguments: Mapping[str, Node], nearest: NearestMiss) -> Iterator[Match]:
        letters: dict[str, Index] = {}
        operands = {name: operand for name, operand in self.operands.items() if name in arguments}
        for name, operand in operands.items():
            for letter, size in zip(operand.letters, sizes_of_rows(arguments[name], len(operand.letters)), strict=True):
                found = extent(letters.setdefault(letter, fresh(size)))
                if found != size:  # the same number, but a proof for one is not a proof for the other
                    because = f"too little is known about the sizes of the operands of {name_of(node)}"
                    miss = NoMatch(because + unproved(node.graph, found, EQUAL, size), node)
                    nearest.fail(Match(), miss, is_certain=True)
        fixed = frozenset(axis for letter in self.fixed for axis in letters[letter].axes)
        partial: Iterator[Match] = iter((Match(fixed=fixed),))
        for name, operand in operands.items():
            dims = tuple(letters[letter] for letter in operand.letters)
            partial = _each_read(f"{name}.axes", OperandAxes(arguments[name], dims, operand.letters), partial)
            partial = _each(operand.pattern, element_of_rows(arguments[name], dims), partial, nearest)
        return partial


@dataclass(frozen=True)
class ValuePattern:
    """What a node computes, with a letter per dimension. Its own axes are bound as `value.axes` and equal no others."""

    pattern: Pattern
    letters: str

    def at(self, node: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which the value of a node satisfies the pattern."""
        dims, letters = fresh_index(node), self.letters.replace(" ", "")
        if len(dims) != len(letters):
            return nearest.fail(Match(), NoMatch(f"expected {len(letters)} dimensions, found {len(dims)}", node))
        fixed = frozenset(axis for dim in dims for axis in dim.axes)
        match = Match(fixed=fixed).read("value.axes", OperandAxes(node, dims, letters))
        yield from self.pattern.bindings(resolve(node, dims), match, nearest)


def _each_read(name: str, reading: Reading, before: Iterator[Match]) -> Iterator[Match]:
    return (match.read(name, reading) for match in before)
