"""Numbers that a program dequantises: `(codes + offset) * scale`, with codes in 8 bits.

A number that multiplies everything is the factor of an element; it is no scale here."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.ops.common.check import FLOATS
from mla_fx.readings.calls import CASTS, DIVIDES, MULTIPLIES, args_of, operands_of, options_of
from mla_fx.readings.element import (
    Element,
    before_cast,
    computed_between,
    has_8_bits,
    is_coarser,
    operands,
    readers,
)
from mla_fx.readings.reading import Reading
from mla_fx.readings.views import MOVERS

aten = torch.ops.aten
SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
COMPUTES = CASTS | MULTIPLIES | DIVIDES | SUMS
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


def dequantised(element: Element, stored: Collection[torch.dtype] = (torch.int8,)) -> Dequantised:
    """Read `element` as a number that is dequantised from codes of one of the dtypes. Raises NoMatch if it is none."""
    node = element.node
    stored_dtype = node.meta["val"].dtype
    dtype = (*element.roundings, element.dtype if stored_dtype in stored else stored_dtype)[0]
    if node.target in DIVIDES:
        raise NoMatch("codes are divided, expected a product with a scale", node)
    numbers, scale = _scaled(element, stored)
    found = _shifted(numbers, stored)
    if found is None:
        kinds = " or ".join(map(str, stored))
        raise NoMatch(f"expected codes in {kinds}, an offset that is added and a scale that multiplies both", node)
    codes, offset = found
    calls = _rounding_to(dtype, element, codes, [part for part in (scale, offset) if part is not None])
    return Dequantised(node, codes, scale, offset, dtype, tuple(calls))


def _scaled(element: Element, stored: Collection[torch.dtype]) -> tuple[Element, Element | None]:
    """Codes with their offset, and their scale if there is one."""
    factors = operands(element) if element.origin.target is aten.mul.Tensor else []
    for numbers, scale in itertools.permutations(factors, 2):
        if _shifted(numbers, stored) is not None:
            return numbers, scale
    return element, None


def _shifted(numbers: Element, stored: Collection[torch.dtype]) -> tuple[Element, Element | None] | None:
    """Codes and the offset that is added to them, if there is one; None if these are no codes."""
    node, codes = numbers.origin, _codes(numbers, stored)
    if codes is not None:
        return codes, None
    is_sum = node.target in SUMS and len(args_of(node)) == 2 and not options_of(node)
    if not is_sum or not node.meta["val"].is_floating_point() or numbers.factor != 1.0:
        return None
    terms, sign = operands(numbers), -1.0 if node.target is aten.sub.Tensor else 1.0
    for term, *offset in (terms,) if sign < 0 else (terms, terms[::-1]):
        codes = _codes(term, stored)
        if codes is not None and offset:
            return codes, offset[0].times(sign)
    return None


def _codes(term: Element, stored: Collection[torch.dtype]) -> Element | None:
    """Codes, or those that a term was cast from, to a dtype that holds them all; None for other terms."""
    found = before_cast(term) if term.origin.meta["val"].dtype in FLOATS else term
    return found if term.factor == 1.0 and found.origin.meta["val"].dtype in stored else None


def _rounding_to(dtype: torch.dtype, element: Element, codes: Element, parts: list[Element]) -> Iterator[Node]:
    """The calls that compute an element from its codes and round to nothing coarser than `dtype`, or get whole numbers,
    casts of it to `dtype`, and the calls between each of the other parts and what it was before casts."""
    for node in computed_between(element.origin, {codes.origin, *(part.seen[0] for part in parts)}):
        is_of_codes = node.target in CASTS and codes.origin in operands_of(node)
        value = node.meta["val"]
        if is_of_codes or (isinstance(value, torch.Tensor) and not is_coarser(value.dtype, dtype)):
            yield node
    casts = (user for user in readers(element.origin, MOVERS) if user.target in CASTS)
    yield from (cast for cast in casts if cast.meta["val"].dtype == dtype)
    for part in parts:
        yield from computed_between(part.seen[0], {part.origin})


def codes_behind(element: Element, near: int = NEAR) -> Element | None:
    """The numbers of 8 bits from which an element is computed by casts, sums and products; None if there are none."""
    node = element.origin
    if node.target in COMPUTES and near:
        behind = (codes_behind(source, near - 1) for source in operands(element))
        return next((found for found in behind if found is not None), None)
    return element if has_8_bits(node) else None
