"""Sizes: numbers, or expressions over the symbols of a dynamic shape; and what can be proved about them.

Nothing here adds a guard, and nothing is assumed of a symbol but what its shape environment made it with: sizes that
guards stand behind are positive, others may be anything."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import sympy

Size = Any  # int, or a sympy expression over the symbols of a dynamic shape


def size_of(value: Any) -> Size:
    """A size as an int or a sympy expression; asking never adds a guard."""
    if isinstance(value, int):
        return value
    expression = value.node.expr
    return int(expression) if isinstance(expression, (int, sympy.Integer)) else expression


def plain(size: Size) -> Size:
    """An int where the expression is one: sympy keeps its own integers."""
    return size if type(size) is int or not isinstance(size, sympy.Integer) else int(size)


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total *= size
    return plain(total)


def strides_of(sizes: Sequence[Size]) -> list[Size]:
    """Row-major strides of a dense tensor."""
    strides: list[Size] = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = plain(strides[dim + 1] * sizes[dim + 1])
    return strides


def ratio(numerator: Size, denominator: Size) -> Size | None:
    """`numerator / denominator` where the division leaves no rest for any value of the symbols, else None."""
    if isinstance(numerator, int) and isinstance(denominator, int):
        return numerator // denominator if denominator and numerator % denominator == 0 else None
    return _symbolic_ratio(sympy.sympify(numerator), sympy.sympify(denominator))


@functools.lru_cache(maxsize=4096)
def _symbolic_ratio(numerator: sympy.Expr, denominator: sympy.Expr) -> Size | None:
    if denominator.is_zero:
        return None
    quotient = sympy.cancel(numerator / denominator)
    if sympy.fraction(sympy.together(quotient))[1] != 1:
        return None
    return plain(quotient)


def at_most(small: Size, large: Size) -> bool:
    """Provably `small <= large`, whatever the symbols stand for."""
    if isinstance(small, int) and isinstance(large, int):
        return small <= large
    return _never_negative(sympy.sympify(large) - sympy.sympify(small))


@functools.lru_cache(maxsize=4096)
def _never_negative(difference: sympy.Expr) -> bool:
    """Written as a polynomial in how far each symbol lies above its least value, it has no negative coefficient."""
    difference = sympy.expand(difference)
    if difference.is_number:
        return bool(difference >= 0)
    atoms = sympy.Poly(difference).gens if difference.is_polynomial() else ()
    least = {atom: _least(atom) for atom in atoms}
    if not atoms or None in least.values():
        return bool(difference.is_nonnegative)
    above = {atom: sympy.Dummy(nonnegative=True) for atom in atoms}
    shifted = sympy.Poly(difference.subs({atom: above[atom] + least[atom] for atom in atoms}), *above.values())
    return all(coefficient >= 0 for coefficient in shifted.coeffs())


def _least(atom: sympy.Expr) -> int | None:
    if atom.is_positive:
        return 1
    return 0 if atom.is_nonnegative else None
