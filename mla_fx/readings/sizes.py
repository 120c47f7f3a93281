"""Sizes: numbers, or expressions over the symbols of a dynamic shape; and what can be proved about them.

Nothing here adds a guard. Of a symbol nothing is assumed but what it was made with (sizes that guards stand behind are
positive, others may be anything) and what the shape environment of the graph at hand knows of it: ranges, and relations
that were established when the graph was traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeAlias

import sympy

from mla_fx.torch_private import guards, is_known

Size: TypeAlias = "int | sympy.Expr"  # a number, or an expression over the symbols of a dynamic shape

Asked = Callable[[Any, Any], bool]

_environment: ContextVar[Asked | None] = ContextVar("what the shape environment of the graph says", default=None)
_same: ContextVar[Mapping[sympy.Symbol, Size]] = ContextVar("symbols of equal sizes", default=MappingProxyType({}))


@contextlib.contextmanager
def known_by(environment: Any) -> Iterator[None]:
    """Proofs may ask a shape environment, whose symbols the sizes are made of; None has nothing to say. It takes its
    time, so it is asked everything once."""
    token = _environment.set(None if environment is None else _asking(environment))
    try:
        yield
    finally:
        _environment.reset(token)


@contextlib.contextmanager
def equated(same: Mapping[sympy.Symbol, Size]) -> Iterator[None]:
    """Symbols that a program cannot run without being equal to some size are read as that size."""
    token = _same.set(same)
    try:
        yield
    finally:
        _same.reset(token)


def _asking(environment: Any) -> Asked:
    bounds = dict.fromkeys(bound for guard in guards(environment) for bound in _never_negative_where(guard))

    @functools.cache
    def at_most(small: Size, large: Size) -> bool:
        difference = sympy.sympify(large) - sympy.sympify(small)
        near = (bound for bound in bounds if bound.free_symbols <= difference.free_symbols)
        return is_known(environment, sympy.Le(small, large)) or any(_never_negative(difference - b) for b in near)

    return at_most


def _never_negative_where(relation: Any) -> Iterator[sympy.Expr]:
    """What a relation says of whole numbers. The environment itself takes no conjunction of two apart."""
    if isinstance(relation, sympy.And):
        for part in relation.args:
            yield from _never_negative_where(part)
    elif isinstance(relation, (sympy.Ge, sympy.Le)):
        yield relation.gts - relation.lts
    elif isinstance(relation, (sympy.Gt, sympy.Lt)) and (difference := relation.gts - relation.lts).is_integer:
        yield difference - 1


def size_of(value: Any) -> Size:
    """A size as an int or a sympy expression; asking never adds a guard."""
    if isinstance(value, int):
        return value
    expression, same = value.node.expr, _same.get()
    expression = expression.xreplace(same) if same else expression
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
    if small == large or _never_negative(sympy.sympify(large) - sympy.sympify(small)):
        return True
    asked = _environment.get()
    return asked is not None and asked(small, large)


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
