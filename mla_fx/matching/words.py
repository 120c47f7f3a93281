"""The pattern language: dataflow over readings, matched with backtracking.

A pattern is a value built from the words below. It says what an element must be computed from. Matching yields *every*
way to satisfy it, so a choice that fails later is taken back. The deepest failure is kept as the nearest miss.

var("x", "n v c")                any element, bound to a name; the same name again means the same tensor. Letters name
                                 its axes: `match.tensor("x", "c nv")` lays it out. With `is_parameter`, nothing
                                 computes it
bound("q", pattern)              the same, for an element that also satisfies a pattern, which is matched once
contract(a, b, name="uq")        a matrix product of a and b, in either order; without a name, one of no factor.
                                 A letter may name what it is summed over: `over="c"`
quantised(a, b, name="up")       the same, also of codes that carry their scales
tokens(value, name="cq.codes")   the codes of a value that the program quantises, with a scale for each token
coded(value, name="codes")       the codes of a value in int8, with a scale that is given
rms_norm(value, gamma, name=..)  a weighted RMSNorm
scaled(value, scale, name=..)    a value multiplied by a smaller tensor
gathered(pages, table, name=..)  rows of pages in a table, in the dtype of the pages or a wider one, or dequantised. A
                                 letter may name what counts pages: `over="p"`
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
ValuePattern(pattern, letters)   what a node computes, with a letter per dimension

`name` keeps a reading for the rule: `match.reading(RmsNorm, "norm")`. A new word is a reader of a `Reading` and a call
of `Reads`, which matches the reading's parts in turn.
"""

from collections.abc import Callable, Iterator

from mla_fx.errors import NoMatch
from mla_fx.readings.axes import Axis
from mla_fx.readings.cache_places import CacheUpdate
from mla_fx.readings.codes.given import static_codes
from mla_fx.readings.codes.products import quantised_product, scaling
from mla_fx.readings.codes.tokens import quantised_tokens
from mla_fx.readings.contraction import Contraction, contraction
from mla_fx.readings.element import Element, is_parameter
from mla_fx.readings.paged import paged_numbers
from mla_fx.readings.rms_norm import rms_norm as read_rms_norm
from mla_fx.readings.rope import rope as read_rope

from .match import Match, OperandAxes
from .pattern import Behind, Bound, Codes, Either, Having, Pattern, Reads, Refused, Stored, Var, both_ways

var, bound, having, refused, stored, behind = Var, Bound, Having, Refused, Stored, Behind


def either(tag: str, **alternatives: Pattern) -> Pattern:
    return Either(tag, alternatives)


def contract(left: Pattern, right: Pattern, name: str = "", over: str = "") -> Pattern:
    def products(element: Element, _: Match) -> Iterator[Contraction]:
        found = contraction(element)
        if not name and found.factor != 1.0:
            raise NoMatch(f"a product is multiplied by a number, {found.factor:.6g}", found.node)
        return both_ways(found)

    return Reads(name, products, {"left": left, "right": right}, over=over)


def quantised(left: Pattern, right: Pattern, name: str, over: str = "") -> Pattern:
    parts = {"left": left, "right": right}
    return Reads(name, lambda element, _: both_ways(quantised_product(element)), parts, over=over)


def tokens(value: Pattern, name: str) -> Pattern:
    def must_be(element: Element) -> bool:
        return element.scales is not None and not is_parameter(element.origin)

    return Codes(name, lambda element, _: (quantised_tokens(element),), {"value": value}, must_be)


def coded(value: Pattern, name: str) -> Pattern:
    return Codes(name, lambda element, _: static_codes(element), {"value": value}, lambda one: one.dtype.itemsize == 1)


def rms_norm(value: Pattern, gamma: Pattern, name: str) -> Pattern:
    return Reads(name, lambda element, _: (read_rms_norm(element),), {"gamma": gamma, "value": value})


def scaled(value: Pattern, scale: Pattern, name: str) -> Pattern:
    return Reads(name, lambda element, _: (scaling(element),), {"value": value, "scale": scale})


def gathered(pages: Pattern, table: Pattern, name: str, over: str = "") -> Pattern:
    return Reads(name, lambda element, _: (paged_numbers(element),), {"pages": pages, "table": table}, over=over)


def rope(value: Pattern, name: str, along: Callable[[Match], Axis]) -> Pattern:
    return Reads(name, lambda element, match: read_rope(element, along(match)), {"value": value})


def last_dimension(operand: str) -> Callable[[Match], Axis]:
    """For `rope(along=...)`: the last dimension of an operand of the call, or of a row stored in it."""

    def along(match: Match) -> Axis:
        update, found = match.get(CacheUpdate, f"{operand}.write"), match.reading(OperandAxes, f"{operand}.axes")
        axis = (found.dims if update is None else update.index)[-1].axis
        if axis is None:
            raise NoMatch("a rotary dimension of one element", found.node)
        return axis

    return along


def normed(value: str, operator: str) -> Pattern:
    """A refused near miss: the value is normalised, but `operator` takes it without a norm."""
    norm = rms_norm(var(value), var(f"gamma of {value}"), name=f"norm of {value}")
    return refused(norm, because=f"{value} is normalised, which {operator} does not support")
