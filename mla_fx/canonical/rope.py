"""Rotary embedding in any spelling, proved pair by pair.

Written out for one pair of elements a rotation is
    first  = x1 * cos - x2 * sin
    second = x2 * cos + x1 * sin
whatever views, halves, stacks or complex numbers spell it. The layout read (where x1 and x2 lie) and the layout written
(where first and second go) are found by reading the result at both halves of each candidate layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mla_fx.errors import NoMatch

from .algebra import as_sum
from .axes import Axis, Index, combine, leaves, product, reshape, settle
from .contraction import name_of
from .element import Element, operand, resolve
from .views import args_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Table:
    """cos or sin: what multiplies for the first and for the second element of pair `axis`."""

    first: Element
    second: Element


@dataclass(frozen=True)
class Rope:
    """`value` rotated; `value` is read along `axis`, the tables along `pair`."""

    value: Element
    cos: Table
    sin: Table
    axis: Axis
    pair: Axis
    layout: str


LAYOUTS = ("half", "interleave")
Term = tuple[float, Element, Element]


def pair_index(size: int, layout: str, which: int, pair: Axis) -> Index:
    """Where element `which` of pair number `pair` lies in a dimension of `size`."""
    return combine(which * (size // 2), [(pair, 1)]) if layout == "half" else combine(which, [(pair, 2)])


def rope(element: Element, along: Index) -> Iterator[Rope]:
    """Every way to read `element` as a rotation along a dimension. Raises NoMatch if there is none."""
    axes = leaves(along.axes)
    size = product(axis.size for axis in axes)
    if not isinstance(size, int) or size % 2:
        raise NoMatch(f"a rotary dimension is even and known, this one is {size}", element.node)
    axis = Axis(size)
    refusal = NoMatch(f"expected a rotary embedding, found {name_of(element.node)}", element.node)
    found = False
    for written in LAYOUTS:
        pair = Axis(size // 2)
        try:
            first, second = (_terms(_at_pair(element, axes, size, written, which, pair)) for which in (0, 1))
        except NoMatch:
            continue
        wrong = _wrong_turn(first, second)
        if wrong is not None:
            refusal = NoMatch(wrong, element.node)
            continue
        for rotation in _rotations(first, second, axis, pair, written):
            found = True
            yield rotation
    if not found:
        raise refusal


def _wrong_turn(first: list[Term], second: list[Term]) -> str | None:
    """Why two times two products are no rotation, judged by their factors; None if they may be one."""
    factors = [factor for factor, _, _ in first + second]
    if {round(abs(factor), 6) for factor in factors} != {1.0}:
        return f"the rotated value is multiplied by a number, {factors[0]:.6g}"
    if sorted(factors[:2]) == [-1.0, 1.0] and factors[2:] == [1.0, 1.0]:
        return None
    if sorted(factors[2:]) == [-1.0, 1.0] and factors[:2] == [1.0, 1.0]:
        return "the value is rotated the other way, by minus the angle of sin and cos"
    return "the signs of cos and sin make no rotation"


def _at_pair(element: Element, axes: tuple[Axis, ...], size: int, layout: str, which: int, pair: Axis) -> Element:
    place = reshape((pair_index(size, layout, which, pair),), (size,), [axis.size for axis in axes])
    if place is None:
        raise NoMatch(f"the rotary dimension is not written in layout {layout}", element.node)
    return element.at(dict(zip(axes, place, strict=True)))


def _terms(element: Element) -> list[Term]:
    """Two products of two elements each, with their signs."""
    if element.node.target is aten.view_as_real.default:
        return _complex_terms(element)
    total = as_sum(element)
    if len(total.terms) != 2 or total.constant:
        raise NoMatch(f"expected a rotary embedding, found {name_of(element.node)}", element.node)
    return [_term(term) for term in total.terms]


def _term(element: Element) -> Term:
    if element.node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a product with cos or sin, found {name_of(element.node)}", element.node)
    left, right = (operand(value, element.index) for value in args_of(element.node)[:2])
    return element.scale * left.scale * right.scale, left.unscaled(), right.unscaled()


def _complex_terms(element: Element) -> list[Term]:
    """One part of a complex product, multiplied out: real `ac - bd`, imaginary `ad + bc`."""
    *index, part = element.index
    product = resolve(args_of(element.node)[0], tuple(index))
    if part.terms or product.node.target is not aten.mul.Tensor:
        raise NoMatch(f"expected a complex rotation, found {name_of(product.node)}", product.node)
    (a, b), (c, d) = (_parts(operand(value, product.index)) for value in args_of(product.node)[:2])
    pairs = [(1.0, a, c), (-1.0, b, d)] if part.offset == 0 else [(1.0, a, d), (1.0, b, c)]
    return [(sign * left.scale * right.scale, left.unscaled(), right.unscaled()) for sign, left, right in pairs]


def _parts(number: Element) -> tuple[Element, Element]:
    """Real and imaginary part of a complex element; of a computed one, read through a last dimension of two."""
    index = number.index
    if number.node.target is aten.view_as_complex.default:
        source = args_of(number.node)[0]
        return resolve(source, (*index, Index(0))), resolve(source, (*index, Index(1)))
    if number.node.target is aten.complex.default:
        real, imaginary = args_of(number.node)
        return operand(real, index), operand(imaginary, index)
    return Element(number.node, (*index, Index(0))), Element(number.node, (*index, Index(1)))


def _rotations(first: list[Term], second: list[Term], axis: Axis, pair: Axis, written: str) -> Iterator[Rope]:
    """Assigns x1, x2, cos and sin; rotating x by the table and the table by x look alike, so both are offered."""
    minus, plus = sorted(first, key=lambda term: term[0])
    for (x1, cos_first), (x2, sin_first) in itertools.product(_both_ways(plus), _both_ways(minus)):
        read = _layout_read(x1, x2, pair)
        if read is None:
            continue
        cos_second, sin_second = _cofactor(second, x2), _cofactor(second, x1)
        if cos_second is None or sin_second is None or cos_second.node is not cos_first.node:
            continue
        value = _along(x1, read, axis, pair)
        yield Rope(value, Table(cos_first, cos_second), Table(sin_first, sin_second), axis, pair, f"{read}_{written}")


def _both_ways(term: Term) -> tuple[tuple[Element, Element], tuple[Element, Element]]:
    _, left, right = term
    return (left, right), (right, left)


def _cofactor(terms: list[Term], factor: Element) -> Element | None:
    """What multiplies `factor` in the one term that has it."""
    for _, left, right in terms:
        if left.same_as(factor):
            return right
        if right.same_as(factor):
            return left
    return None


def _layout_read(x1: Element, x2: Element, pair: Axis) -> str | None:
    """How the two elements of a pair lie to each other in the value that is rotated."""
    x1, x2 = x1.settled(), x2.settled()
    if x1.node is not x2.node:
        return None
    apart = [(mine, theirs) for mine, theirs in zip(x1.index, x2.index, strict=True) if mine != theirs]
    if len(apart) != 1 or apart[0][0].terms != apart[0][1].terms:
        return None
    stride = dict(apart[0][0].terms).get(pair)
    distance = apart[0][1].offset - apart[0][0].offset
    if stride == 2 and distance == 1:
        return "interleave"
    return "half" if stride == 1 and distance == pair.size else None


def _along(x1: Element, layout: str, axis: Axis, pair: Axis) -> Element:
    """The value rotated, read along the rotary axis: x1 is its every first element."""

    def whole(part: Index) -> Index:
        part = settle(part)
        stride = dict(part.terms).get(pair)
        if stride is None:
            return part
        rest = [term for term in part.terms if term[0] is not pair]
        return combine(part.offset, [*rest, (axis, stride // 2 if layout == "interleave" else stride)])

    index = tuple(whole(part) for part in x1.index)
    top = x1.top and (x1.top[0], tuple(whole(part) for part in x1.top[1]))
    return replace(x1, index=index, top=top)
