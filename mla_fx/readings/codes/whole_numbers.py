"""Whole numbers that a program rounds to, clamps and casts: what is rounded, and what becomes of each whole number."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import unset_fake_temporarily
from mla_fx.readings.bounds import BY_NUMBERS, Bounds, bounded
from mla_fx.readings.calls import CASTS, args_of
from mla_fx.readings.element import Element, computed_between, computed_from, element_of, resolve
from mla_fx.readings.reading import Reading
from mla_fx.readings.views import MOVERS

from .code_arithmetic import CodeArithmetic, Draws

aten = torch.ops.aten
ADDS: frozenset[Any] = frozenset({aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar})
STEPS = frozenset({*MOVERS, *CASTS, *ADDS, *BY_NUMBERS, aten.trunc.default})
ZERO_POINT = "the codes have a zero point, expected none"


@dataclass(frozen=True)
class Codes(Reading):
    """Codes of `value`. The calls in `whole`, on the way from the rounded value to the codes, get whole numbers, so
    they round nothing."""

    value: Element
    whole: tuple[Node, ...]


@dataclass(frozen=True)
class WholeNumbers:
    """The nearest whole numbers of `value`, from which `calls` compute the codes. Before it is rounded, the value may
    be cast to `dtypes`, and be bounded."""

    value: Element
    calls: tuple[Node, ...]
    dtypes: tuple[torch.dtype, ...]
    arithmetic: CodeArithmetic
    place: int

    def of(self, numbers: Tensor) -> Tensor:
        """The codes of whole numbers; NaN for those that an integer does not hold, which a cast may wrap."""
        return self.arithmetic.at(Draws(numbers, numbers, numbers), self.place, rounds=True)[0].double()

    def bounded(self, within: Bounds, offset: float = 0.0) -> Bounds:
        """The bounds of codes, for whole numbers in some bounds to which an offset was added. Raises NoMatch unless
        each of them is its own code, as far as the bounds."""
        with unset_fake_temporarily():
            numbers = whole().clamp(*within)
            codes, node = self.of(numbers + offset), self.calls[0]
            kept = codes[~codes.isnan()]
            found = Bounds(kept.min().item(), kept.max().item())
            others = (codes != numbers.clamp(*found)) | (codes != codes.round())
            if others[numbers == 0].any():
                raise NoMatch(ZERO_POINT, node)
            number = min(numbers[others].tolist(), key=abs, default=None)
            if len(kept) < len(codes):
                said = f"codes from {within.low:.6g} to {within.high:.6g} are cast to integers and not clamped before"
                raise NoMatch(f"{said}, so {number:.6g} wraps", node)
            if number is not None:
                code = codes[numbers == number][0].item()
                raise NoMatch(f"values that round to {number:.6g} have the code {code:.6g}", node)
        return found


@functools.cache
def whole() -> Tensor:
    """All small whole numbers, and some on each scale."""
    large = 2.0 ** torch.arange(11, 100, dtype=torch.float64)
    ends = torch.cat((large, torch.full((1,), math.inf)))
    return torch.cat((torch.arange(-1024, 1025), ends, -ends))


def whole_numbers(element: Element) -> WholeNumbers:
    """What an element is rounded from, to the nearest whole number. Raises NoMatch if it is not rounded so."""
    start = element.origin
    walked = [*computed_from(start, lambda node: node.target not in STEPS)] if start.target in STEPS else [start]
    rounded = next((node for node in walked if node.target is aten.round.default), None)
    if rounded is None:
        other = next((node for node in walked if node.target not in STEPS), start)
        raise NoMatch(f"expected codes rounded to the nearest whole number, found {name_of(other)}", other)
    given = source = args_of(rounded)[0]
    while (value := element_of(source)).factor == 1.0 and (limited := bounded(value.origin)) is not None:
        source = limited[0]
    arithmetic = CodeArithmetic(source=value.seen[0])
    place = arithmetic.read(Element(start, element.index))
    inside, *others = arithmetic.values.values()
    if others:
        raise NoMatch("codes are computed from several rounded values", start)
    calls = *computed_between(start, {rounded}), rounded
    between = computed_between(given, {value.seen[0]})
    dtypes = tuple(node.meta["val"].dtype for node in between)
    return WholeNumbers(resolve(inside.origin, inside.index), calls, dtypes, arithmetic, place)


def check_codes(element: Element) -> None:
    """Raises NoMatch unless an element is a whole number that int8 holds."""
    if element.origin.meta["val"].dtype == torch.int8:
        return
    with unset_fake_temporarily():
        codes = whole_numbers(element).of(whole())
        if not ((codes >= -128) & (codes <= 127)).all():
            raise NoMatch("the codes of tokens are not clamped to the range of int8", element.origin)
