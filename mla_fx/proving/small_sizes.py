"""A small number for each size in a part of a graph, such that its calls still fit together.

Equal sizes get equal numbers, so what had to be as long as something else still is. The equations of views and slices
determine some of the numbers; the others are chosen small, growing with the sizes, and all different. Sizes in
equations that contradict each other stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from .equations import Equation

SMALL = 4  # the largest size that always stays as it is


def small_sizes(
    sizes: Iterable[int], equations: Iterable[Equation], keep: Collection[int] = (), first: int = SMALL + 1
) -> Mapping[int, int]:
    """A number for each size, the smallest chosen one being `first`. Sizes in `keep` stay as they are."""
    asked = {each for each in equations if each.whole not in each.parts}
    numbers = {*sizes, *(size for each in asked for size in (each.whole, *each.parts))}
    kept = {size for size in numbers if size <= SMALL or size in keep}
    while True:
        small = _assigned(numbers, asked, kept, first)
        broken = [each for each in asked if small[each.whole] != each.combine(small[part] for part in each.parts)]
        more = {size for each in broken for size in (each.whole, *each.parts)} - kept
        if not more:
            return small
        kept |= more


def _assigned(numbers: set[int], equations: Iterable[Equation], kept: set[int], first: int) -> dict[int, int]:
    """Sizes are assigned in order, so parts come before their whole."""
    products_first = sorted(equations, key=lambda each: (each.combine is sum, each.parts))
    determined = {each.whole: each for each in reversed(products_first)}
    small = {size: size for size in kept}
    free = (number for number in range(first, max(numbers, default=0) + first + len(numbers)) if number not in kept)
    for size in sorted(numbers - kept):
        equation = determined.get(size)
        small[size] = next(free) if equation is None else equation.combine(small[part] for part in equation.parts)
    return small
