"""Tokens that the program quantises: codes, and a scale for each token, in any spelling.

    codes = round(clip(steps * value / m, -most, most)),   scale = unit * m,   m = max(max |value|, guard)

Both are evaluated, and the numbers are found from their values. If more or fewer than 127 steps are clipped to 127,
values are clipped to a part of their largest one. A graph input that divides the steps and multiplies the unit is this
part, or a number of times it is.

Kernels have 127 steps and compute in float32. Codes of a program that does not may differ from theirs by 1; then
`differences` says why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import name_of
from mla_fx.graph.torch_private import unset_fake_temporarily
from mla_fx.readings.axes import Index
from mla_fx.readings.bounds import Bounds
from mla_fx.readings.calls import DIVIDES, MULTIPLIES
from mla_fx.readings.element import Element, computed_between, is_coarser, narrows, resolve

from .code_arithmetic import OTHER_VALUES, CodeArithmetic, Draws, are_close, largest, source_of
from .vendor_calls import dynamic_quant, is_dynamic_quant
from .whole_numbers import ADDS, Codes, whole_numbers

aten = torch.ops.aten
STEPS = 127.0
NEAR_STEPS = (STEPS, 127.5)
ARITHMETIC = MULTIPLIES | DIVIDES | ADDS | {aten.reciprocal.default}
LARGE, SMALL = 1e12, 1e-60  # largest values above all guards, and below
EXPONENTS = -60, 30
FAR, NEAR = 1e5, 1e-3  # values as multiples of the largest, which clips reach and do not reach
OTHER_SCALE = "the codes of tokens are multiplied by a scale that they were not divided by"
SCALES = "the scales of tokens are computed"
LOST = "codes or scales of tokens lose digits that they have in torch.float32, as a kernel computes them"
NO_QUOTIENTS = "the codes of tokens are not a number of steps times value / largest magnitude"
OTHER_PART = "values are clipped to another part of their largest one than that of their scale"


@dataclass(frozen=True)
class QuantisedTokens(Codes):
    """Codes along the indices of `over`, with a scale for each token."""

    over: tuple[Index, ...]
    differences: tuple[str, ...]

    @property
    def constants(self) -> tuple[Any, ...]:
        return (self.differences,)


@dataclass(frozen=True)
class Law:
    """What codes and scales are; `offset` is added to codes before they are rounded. `is_given` says whether a graph
    input divides the steps, and `turned` which code a value gets where it is negative, in clips."""

    steps: float
    clip: Bounds
    unit: float
    guards: tuple[float, float]
    offset: float
    is_given: bool
    turned: float

    @classmethod
    def of(cls, arithmetic: CodeArithmetic, code: int, scale: int) -> Law:
        def at(value: float, largest: float = LARGE, given: float = 1.0) -> tuple[float, float]:
            one, other = arithmetic.at(Draws.one(value, largest, given), code, scale)
            return one.item(), other.item()

        offset, total = at(0.0)
        steps, unit = (at(NEAR * LARGE)[0] - offset) / NEAR, total / LARGE
        ends = (at(side * FAR * LARGE)[0] - offset for side in (-1, 1))
        clip = Bounds(*(end if abs(end) < abs(steps) * FAR / 2 else math.copysign(math.inf, end) for end in ends))
        value, least = at(NEAR * SMALL, SMALL)
        counts = steps * NEAR * SMALL / (value - offset) if value != offset else math.inf, least / (unit or math.nan)
        guards = tuple(0.0 if count < 1.001 * SMALL else count for count in counts)
        turned = at(NEAR * LARGE, given=-1.0)[0] - offset
        return cls(steps, clip, unit, (guards[0], guards[1]), offset, bool(arithmetic.leaves), turned)

    @property
    def reached(self) -> Bounds:
        """The codes that values of a row reach."""
        most = math.inf if self.is_given else self.steps
        ends = (end if math.isfinite(end) else math.copysign(most, end) for end in self.clip)
        return Bounds(*(float(round(end)) if math.isfinite(end) else end for end in ends))

    def check(self, arithmetic: CodeArithmetic, code: int, scale: int, node: Node) -> None:
        """Raises NoMatch unless all codes and scales obey the law."""
        if self.is_given and not math.isclose(-self.clip.low, self.clip.high):
            raise NoMatch("values are clipped to two bounds, expected plus and minus one", node)
        draws = Draws.many(*EXPONENTS, math.log10(FAR) - 1)
        arithmetic.check_reached(draws)
        given = draws.given if self.is_given else torch.ones_like(draws.given)
        one, other = (largest(draws.row).clamp(min=guard) for guard in self.guards)
        codes = (self.steps / given * draws.value / one).clamp(*self.clip)
        if self.is_given and math.isfinite(self.clip.high):
            codes = torch.where(given < 0, self.turned, codes)
        found, scales = arithmetic.at(draws, code, scale)
        if not are_close(found, codes + self.offset, self.offset):
            raise NoMatch(OTHER_PART if self.is_given else NO_QUOTIENTS, node)
        if not are_close(scales / other, self.unit * given):
            raise NoMatch(OTHER_PART if self.is_given else OTHER_SCALE, node)
        if self.unit <= 0:
            raise NoMatch(f"the scale of a token is {self.unit:.6g} times its largest value", node)
        if self.offset % 2:  # an odd one moves what is rounded to even
            raise NoMatch(f"{self.offset:.6g} is added to codes before they are rounded, expected an even number", node)
        for value, size in ((0.0, 0.0), (1.0, math.inf)):
            found, scales = arithmetic.at(Draws.one(value, size, 1.0), code, scale)
            is_alike = math.isclose(scales.item(), self.unit * max(size, self.guards[1]))
            if not is_alike or found.nan_to_num(self.offset).item() != self.offset:
                raise NoMatch(f"tokens whose largest value is {size:.6g} are quantised otherwise than others", node)


@dataclass(frozen=True)
class Part:
    """Values are clipped to `number * factor` of their largest one; no `factor` is one."""

    number: float
    factor: Element | None

    @classmethod
    def of(cls, law: Law, bounds: Bounds, factor: Element | None, node: Node) -> Part | None:
        """None if values are not clipped. Raises NoMatch if the largest code is not that of a kernel."""
        largest = min(-bounds.low, bounds.high)
        if largest < STEPS:
            raise NoMatch(f"the largest code of a token is {largest:.6g}, expected 127", node)
        if factor is None and any(math.isclose(law.steps, near, rel_tol=1e-3) for near in NEAR_STEPS):
            return None
        if bounds != (-STEPS, STEPS) or (factor is not None and math.isinf(law.clip.high)):
            what = "a scale is that of a part of the largest value, to which no value is clipped"
            raise NoMatch(what, node)
        return cls(min(law.clip.high, STEPS) / law.steps, factor)


@dataclass(frozen=True)
class Evaluated:
    """Quantised tokens, the part of the largest value to which they are clipped, and their arithmetic, with points in
    the program's own dtype and the places of what is rounded and of the scale."""

    tokens: QuantisedTokens
    part: Part | None
    arithmetic: CodeArithmetic
    draws: Draws
    places: tuple[int, int]

    @classmethod
    def of(cls, element: Element) -> Evaluated:
        """Raises NoMatch if codes are no tokens."""
        node, scales, codes = element.origin, _scales(element), whole_numbers(element)
        arithmetic = CodeArithmetic(source=source_of(codes.value.seen[0]))
        code = arithmetic.read(codes.value)
        value, over = arithmetic.row(OTHER_VALUES)
        places = code, arithmetic.product(scales)
        arithmetic.row(OTHER_SCALE)
        with unset_fake_temporarily():
            law = Law.of(arithmetic, *places)
            law.check(arithmetic, *places, node)
            draws = arithmetic.drawn(guarded=any(law.guards))
            is_precise = _is_precise(arithmetic, draws, *places)
        bounds = codes.bounded(law.reached, law.offset)
        part = Part.of(law, bounds, next(iter(arithmetic.leaves.values()), None), node)
        narrow = (
            *rounded_in("the codes of tokens are computed", codes.calls[-1], {value.origin}),
            *(found for one in scales for found in rounded_in(SCALES, one.seen[0], {value.origin})),
        )
        differences = *_differences(law, part), *(narrow or (() if is_precise else (LOST,)))
        factor = law.steps * law.unit
        quantised = resolve(value.origin, value.index).times(1.0 if math.isclose(factor, 1.0, rel_tol=5e-7) else factor)
        return cls(QuantisedTokens(node, quantised, codes.calls, over, differences), part, arithmetic, draws, places)


def _is_precise(arithmetic: CodeArithmetic, draws: Draws, code: int, scale: int) -> bool:
    """Whether the program's dtypes lose no more than float32 does: large numbers may cancel, or leave its range."""
    codes, scales = arithmetic.at(draws, code, scale, rounds=True)
    exact, others = arithmetic.at(draws.to(torch.float64), code, scale)
    return bool(((codes - exact).abs() <= 1e-4).all() and ((scales - others).abs() <= 1e-5 * others).all())


def _scales(element: Element) -> tuple[Element, ...]:
    if element.scales is None or not element.scales.by:
        raise NoMatch("expected the codes of tokens with a scale, found none", element.origin)
    return element.scales.by


def quantised_tokens(element: Element) -> QuantisedTokens:
    """Read codes that carry scales as quantised tokens. Raises NoMatch if they are none, or if their values are
    clipped."""
    if is_dynamic_quant(element.origin):
        value, over = dynamic_quant(element, _scales(element))
        return QuantisedTokens(element.origin, value, (), over, ())
    found = Evaluated.of(element)
    if found.part is not None:
        raise NoMatch("the values of tokens are clipped to a part of their largest one", element.origin)
    return found.tokens


# --- differences from a kernel ---------------------------------------------------------------------------------------


def _differences(law: Law, part: Part | None) -> Iterator[str]:
    if part is None and not math.isclose(law.steps, STEPS, rel_tol=1e-6):
        yield f"the largest code of a token is {law.steps:.6g}, of a kernel 127"
    if any(law.guards):  # a row may be as small as its norm's weight is, so any of them may act
        yield f"the largest value of a token counts as {max(law.guards):.3g} at least, in a kernel as it is"
    if part is not None and part.factor is not None and law.turned > 0:
        name = name_of(part.factor.origin)  # which may make the bound negative
        yield f"values are clipped from below first, in a kernel from above: it matters where {name} is negative"


def rounded_in(what: str, start: Node, stops: set[Node]) -> Iterator[str]:
    """Whether arithmetic between a node and `stops` is rounded to 16 bits."""
    for node in computed_between(start, stops):
        value = node.meta["val"]  # or the parts of a split
        is_narrow = isinstance(value, torch.Tensor) and is_coarser(value.dtype, torch.float32)
        if is_narrow and (node.target in ARITHMETIC or narrows(node)):
            yield f"{what} in {value.dtype}, in a kernel in torch.float32"
            return
