"""Rotary embedding in any spelling, proved pair by pair.

For one pair of elements, a rotation is
    first  = x1 * cos - x2 * sin
    second = x2 * cos + x1 * sin
in whatever views, halves, stacks or complex numbers. The layout read (the places of x1 and x2) and the layout written
(the places of first and second) are found by reading the result at both halves of each candidate layout. The factors of
x1 and x2 are cos and sin, with every sign and number: a table may hold any numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of

from .algebra import as_sum
from .axes import Axis, Index, combine, of_axis, whole
from .calls import args_of, argument
from .element import Element, operand, resolve
from .reading import Reading

aten = torch.ops.aten


@dataclass(frozen=True)
class Table(Reading):
    """cos or sin: the factors for the first and for the second element of a pair."""

    first: Element
    second: Element


@dataclass(frozen=True)
class Rope(Reading):
    """`value` rotated; `value` is read along `along`, the tables along `pair`."""

    value: Element
    cos: Table
    sin: Table
    along: Index
    pair: Index
    layout: str

    @property
    def constants(self) -> tuple[str]:
        return (self.layout,)


LAYOUTS = ("half", "interleave")


@dataclass(frozen=True)
class Term:
    """`left * right`; a number that multiplies the product is in one of them."""

    left: Element
    right: Element

    def over(self, factor: Element) -> Element | None:
        """The other factor next to `factor`, which has no number of its own. A number that `factor` has here multiplies
        the result instead; raises NoMatch if that may leave the range of its dtype."""
        for mine, other in ((self.left, self.right), (self.right, self.left)):
            number, plain = mine.apart()
            if plain != factor:
                continue
            if not _has_room(number, other.dtype):
                reason = f"a rotary table would be multiplied by {number:.6g}, which {other.dtype} may not hold"
                raise NoMatch(reason, other.origin)
            return other.times(number)
        return None


def _has_room(number: float, dtype: torch.dtype) -> bool:
    """Whether a number may multiply values of a dtype: in float16 it only shrinks them, and not beyond their precision;
    in other dtypes it does not grow them much."""
    if dtype == torch.float16:
        return 1 / 16 <= abs(number) <= 1
    most = torch.finfo(dtype).max ** 0.25 if dtype.is_floating_point else 1.0
    return 1 / most <= abs(number) <= most


def pair_index(size: int, layout: str, which: int, pair: Axis) -> Index:
    """The index of element `which` of pair number `pair` in a dimension of `size`."""
    return of_axis(pair, 1, which * (size // 2)) if layout == "half" else of_axis(pair, 2, which)


def rope(element: Element, along: Axis) -> Iterator[Rope]:
    """Yield every way to read `element` as a rotation along a dimension. Raises NoMatch if there is none."""
    size = along.size
    if not isinstance(size, int) or size % 2:
        raise NoMatch(f"the rotary dimension must be even and known, this one is {size}", element.origin)
    found = False
    for written in LAYOUTS if size > 2 else LAYOUTS[:1]:  # a single pair is the same in both
        pair = Axis(size // 2)
        try:
            first, second = (_terms(element.at({along: pair_index(size, written, which, pair)})) for which in (0, 1))
        except NoMatch:
            continue
        for rotation in _rotations(element.origin, first, second, Axis(size), pair, written):
            found = True
            yield rotation
    if not found:
        raise NoMatch(f"expected a rotary embedding, found {name_of(element.origin)}", element.origin)


def _terms(element: Element) -> tuple[Term, Term]:
    """Read two products of two elements each."""
    if element.origin.target is aten.view_as_real.default:
        return _complex_terms(element)
    if element.origin.target is aten.addcmul.default:
        return _added_product(element)
    total = as_sum(element)
    if len(total.terms) != 2 or total.constant:
        raise NoMatch(f"expected a rotary embedding, found {name_of(element.origin)}", element.origin)
    one, other = (_term(term) for term in total.terms)
    return one, other


def _term(element: Element) -> Term:
    factor, element = element.apart()
    if element.node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a product with cos or sin, found {name_of(element.node)}", element.node)
    left, right = (operand(value, element.index) for value in args_of(element.node)[:2])
    return Term(left.times(factor), right)


def _added_product(element: Element) -> tuple[Term, Term]:
    """Read `addcmul(left * right, one, other, value=number)`."""
    factor, element = element.apart()
    added, one, other = (operand(value, element.index) for value in args_of(element.node)[:3])
    number = argument(element.node, 3, "value", 1)
    if not isinstance(number, (int, float)):
        raise NoMatch("a rotary table is multiplied by a number known at run time", element.node)
    return _term(added.times(factor)), Term(one.times(factor * number), other)


def _complex_terms(element: Element) -> tuple[Term, Term]:
    """Read one part of a complex product, multiplied out: real `ac - bd`, imaginary `ad + bc`."""
    factor, element = element.apart()
    *index, part = element.index
    number, product = resolve(args_of(element.node)[0], tuple(index)).apart()
    if part.terms or product.node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a complex rotation, found {name_of(product.node)}", product.node)
    (a, b), (c, d) = (_parts(operand(value, product.index)) for value in args_of(product.node)[:2])
    a, b = a.times(factor * number), b.times(factor * number)
    return (Term(a, c), Term(b.times(-1.0), d)) if part.offset == 0 else (Term(a, d), Term(b, c))


def _parts(value: Element) -> tuple[Element, Element]:
    """The real and imaginary part of a complex element; a computed one is read through a last dimension of two."""
    factor, value = value.apart()
    node, index = value.node, value.index
    if node.target in CONJUGATES:
        real, imaginary = _parts(resolve(args_of(node)[0], index))
        imaginary = imaginary.times(-1.0)
    elif node.target is aten.view_as_complex.default:
        real, imaginary = (resolve(args_of(node)[0], (*index, Index(which))) for which in (0, 1))
    elif node.target is aten.complex.default:
        real, imaginary = (operand(part, index) for part in args_of(node))
    else:
        real, imaginary = (Element(node, (*index, Index(which))) for which in (0, 1))
    return real.times(factor), imaginary.times(factor)


CONJUGATES = frozenset({aten._conj.default, aten.conj_physical.default, aten._conj_physical.default})


def _rotations(
    node: Node, first: tuple[Term, Term], second: tuple[Term, Term], along: Axis, pair: Axis, written: str
) -> Iterator[Rope]:
    """Assign x1, x2, cos and sin. Rotating x by the table and the table by x look alike, so both are yielded.

    x1 enters first and second, and so does x2: each is one side of one term in both."""
    for one, other in (first, first[::-1]):
        for x1, x2 in itertools.product((one.left, one.right), (other.left, other.right)):
            x1, x2 = x1.apart()[1], x2.apart()[1]
            read = _layout_read(x1, x2, pair)
            if read is None:
                continue
            cos_first, minus_sin = one.over(x1), other.over(x2)
            for back, forth in (second, second[::-1]):
                cos_second, sin_second = back.over(x2), forth.over(x1)
                if cos_first is None or minus_sin is None or cos_second is None or sin_second is None:
                    continue
                value = _along(x1, x2, read, along, pair)
                cos, sin = Table(node, cos_first, cos_second), Table(node, minus_sin.times(-1.0), sin_second)
                yield Rope(node, value, cos, sin, of_axis(along), of_axis(pair), f"{read}_{written}")


def _layout_read(x1: Element, x2: Element, pair: Axis) -> str | None:
    """The layout of the two elements of a pair in the rotated value."""
    if x1.node is not x2.node or x1.roundings != x2.roundings:
        return None
    places = list(zip(x1.index, x2.index, strict=True))
    apart = [(mine, theirs) for mine, theirs in places if mine != theirs]
    if len(apart) != 1 or apart[0][0].terms != apart[0][1].terms:
        return None
    if any(mine == theirs and pair in mine.axes for mine, theirs in places):
        return None
    stride = 1 if pair.size == 1 else dict(apart[0][0].terms).get(whole(pair))
    distance = apart[0][1].offset - apart[0][0].offset
    if stride == 2 and distance == 1:
        return "interleave"
    return "half" if stride == 1 and distance == pair.size else None


def _along(x1: Element, x2: Element, layout: str, along: Axis, pair: Axis) -> Element:
    """The rotated value, read along the rotary axis: it begins at x1 and runs through both elements of every pair.

    If both elements were cast alike, the value before the casts is read in the same way."""
    value = replace(x1, index=_runs(x1.index, x2.index, along, pair))
    (node, mine), (other, theirs) = x1.seen, x2.seen
    places = Element(node, mine), Element(other, theirs)
    if x1.top_factor != x2.top_factor or _layout_read(*places, pair) != layout:
        return replace(value, top=None)
    return replace(value, top=(node, _runs(mine, theirs, along, pair)))


def _runs(first: tuple[Index, ...], second: tuple[Index, ...], along: Axis, pair: Axis) -> tuple[Index, ...]:
    """The index of the rotated value, from those of the two elements of a pair, which differ in one dimension."""
    moved: list[Index] = []
    for mine, theirs in zip(first, second, strict=True):
        rest = [term for term in mine.terms if term[0].axis is not pair]
        moved.append(mine if mine == theirs else combine(mine.offset, [*rest, (whole(along), 1)]))
    return tuple(moved)
