"""A small number for each size in a part of a graph, such that its calls still fit together.

Equal sizes get equal numbers, so what had to be as long as something else still is. The equations of views and slices
determine some of the numbers; the others are chosen small, growing with the sizes, and all different. A size that is as
large as a tensor has whole numbers still is: they may all be different places in it. Sizes in equations that contradict
each other stay as they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from .equations import Equation, Shape, of_cuts

SMALL = 4  # the largest size that always stays as it is
MORE = 3  # than the places; whole numbers are drawn from a few more


def small_sizes(
    sizes: Iterable[int],
    equations: Iterable[Equation],
    places: Collection[Shape] = (),
    keep: Collection[int] = (),
    first: int = SMALL + 1,
    shifts: Collection[int] = (),
) -> Mapping[int, int]:
    """A number for each size, the smallest chosen one being `first`. `places` are the shapes of whole numbers. Sizes in
    `keep` stay as they are. What whole numbers are shifted by is a size that a cache has room for."""
    sizes, equations = {*sizes, *shifts}, [*equations, *of_cuts(*shifts)]
    asked = {each for each in equations if each.whole not in each.parts}
    numbers = {*sizes, *(size for each in asked for size in (each.whole, *each.parts))}
    kept = {size for size in numbers if size <= SMALL or size in keep}
    while True:
        small = _assigned(numbers, asked, places, kept, first, shifts)
        broken = [each for each in asked if small[each.whole] != each.combine(small[part] for part in each.parts)]
        more = {size for each in broken for size in (each.whole, *each.parts)} - kept
        if not more:
            return small
        kept |= more


def _assigned(
    numbers: set[int],
    equations: Iterable[Equation],
    places: Iterable[Shape],
    kept: set[int],
    first: int,
    shifts: Iterable[int],
) -> dict[int, int]:
    """Sizes are assigned in order, so parts come before their whole."""
    products_first = sorted(equations, key=lambda each: (each.combine is sum, each.parts))
    determined = {each.whole: each for each in reversed(products_first)}
    small, last = {size: size for size in kept}, first - 1
    for size in sorted(numbers - kept):
        equation = determined.get(size)
        if equation is not None:
            small[size] = equation.combine(small[part] for part in equation.parts)
            continue
        fitting = (shape for shape in places if math.prod(shape) <= size and small.keys() >= {*shape})
        more = MORE + sum(small[shift] for shift in shifts if shift in small)
        last = max([last + 1, *(math.prod(small[part] for part in shape) + more for shape in fitting)])
        while last in kept:
            last += 1
        small[size] = last
    return small
