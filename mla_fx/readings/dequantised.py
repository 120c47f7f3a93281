"""Numbers that a program dequantises: `(codes + offset) * scale`, with codes in int8.

A number that multiplies everything is the factor of an element; it is no scale here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.ops.common.check import FLOATS

from .algebra import as_sum
from .calls import CASTS, args_of, operands_of
from .element import Element, computed_between, is_coarser, operand
from .reading import Reading
from .views import MOVERS

aten = torch.ops.aten
DIVIDES = frozenset({aten.div.Tensor, aten.div.Scalar})
COMPUTES = CASTS | DIVIDES | {aten.mul.Tensor, aten.mul.Scalar, aten.add.Tensor, aten.sub.Tensor}
NEAR = 5  # operations between codes and what is computed from them


@dataclass(frozen=True)
class Dequantised(Reading):
    """`(codes + offset) * scale`, rounded to `dtype`. Without a scale it is the codes.

    `calls` of the program round nothing any further, or scales and offsets that are read after it."""

    codes: Element
    scale: Element | None
    offset: Element | None
    dtype: torch.dtype
    calls: tuple[Node, ...]


def dequantised(element: Element) -> Dequantised:
    """Read `element` as a number that is dequantised. Raises NoMatch if it is none."""
    node = element.node
    dtype = (*element.roundings, node.meta["val"].dtype)[0]
    if node.target in DIVIDES:
        raise NoMatch("codes are divided, expected a product with a scale", node)
    numbers, scale = _scaled(element)
    total = as_sum(numbers)
    codes = [found for term in total.terms if (found := _codes(term)) is not None]
    offsets = [term for term in total.terms if _codes(term) is None]
    if len(codes) != 1:
        raise NoMatch("expected codes in torch.int8, an offset that is added and a scale that multiplies both", node)
    if total.constant or len(offsets) > 1:
        raise NoMatch("codes have a number or a sum for an offset, expected one tensor", numbers.origin)
    calls = _rounding_to(dtype, element, codes[0], [part for part in (scale, *offsets) if part is not None])
    return Dequantised(node, codes[0], scale, offsets[0] if offsets else None, dtype, tuple(calls))


def _scaled(element: Element) -> tuple[Element, Element | None]:
    """Codes with their offset, and their scale if there is one."""
    sides = _operands(element) if element.origin.target is aten.mul.Tensor else []
    for numbers, scale in itertools.permutations(sides, 2):
        if any(_codes(term) is not None for term in as_sum(numbers).terms):
            return numbers, scale
    return element, None


def _codes(term: Element) -> Element | None:
    """Codes in int8, or those that a term was cast from, to a dtype that holds them all; None for other terms."""
    if term.factor != 1.0:
        return None
    if term.origin.target in CASTS and term.origin.meta["val"].dtype in FLOATS:
        term = operand(args_of(term.origin)[0], term.index)
    return term if term.origin.meta["val"].dtype == torch.int8 else None


def _rounding_to(dtype: torch.dtype, element: Element, codes: Element, parts: list[Element]) -> Iterator[Node]:
    """The calls that compute an element from its codes and round to nothing coarser than `dtype`, or get whole numbers,
    casts of it to `dtype`, and the calls between each of the other parts and what it was before casts."""
    for node in computed_between(element.origin, {codes.origin, *(part.seen[0] for part in parts)}):
        is_of_codes = node.target in CASTS and codes.origin in operands_of(node)
        if is_of_codes or not is_coarser(node.meta["val"].dtype, dtype):
            yield node
    yield from _casts(element.origin, dtype)
    for part in parts:
        yield from computed_between(part.seen[0], {part.origin})


def _casts(node: Node, dtype: torch.dtype) -> Iterator[Node]:
    """The casts of a value to `dtype`, directly or behind views."""
    for user in node.users:
        if user.target in MOVERS:
            yield from _casts(user, dtype)
        elif user.target in CASTS and user.meta["val"].dtype == dtype:
            yield user


def codes_behind(element: Element, near: int = NEAR) -> Element | None:
    """The numbers of 8 bits from which an element is computed by casts, sums and products; None if there are none."""
    node = element.origin
    if node.target in COMPUTES and near:
        behind = (codes_behind(source, near - 1) for source in _operands(element))
        return next((found for found in behind if found is not None), None)
    dtype = node.meta["val"].dtype
    return element if dtype.itemsize == 1 and dtype is not torch.bool else None


def _operands(element: Element) -> list[Element]:
    """The elements of tensors that a pointwise operation reads for an element."""
    values = (value for value in args_of(element.origin)[:2] if isinstance(value, Node))
    return [operand(value, element.index) for value in values if isinstance(value.meta["val"], torch.Tensor)]
