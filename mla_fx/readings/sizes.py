"""Sizes: numbers, or expressions over the symbols of a dynamic shape; and what can be proved about them.

Nothing here adds a guard. Of a symbol nothing is assumed but what it was made with (sizes that guards stand behind are
positive, others may be anything) and what the shape environment of the graph at hand knows of it: ranges, and relations
that were established when the graph was traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import sympy

from mla_fx.graph.torch_private import floor_division, guards, is_known, remainders

Size: TypeAlias = "int | sympy.Expr"  # a number, or an expression over the symbols of a dynamic shape

Asked = Callable[[Any, Any], bool]


class _Same:
    """Symbols with what they are read as. Sizes are asked for often, so each expression is read once."""

    def __init__(self, sizes: Mapping[sympy.Symbol, Size]) -> None:
        self.sizes = sizes
        self.read = functools.cache(lambda expression: plain(_read(expression, sizes)))


_environment: ContextVar[Asked | None] = ContextVar("what the shape environment of the graph says", default=None)
_NONE = _Same({})
_same: ContextVar[_Same] = ContextVar("symbols of equal sizes", default=_NONE)


@contextlib.contextmanager
def known_by(environment: Any) -> Iterator[None]:
    """Proofs may ask a shape environment, whose symbols the sizes are made of; None has nothing to say. It takes its
    time, so it is asked everything once."""
    known = [] if environment is None else guards(environment)
    signed = {} if environment is None else _signs(environment, known)
    with equated(signed):
        products, quotients = _divided(known)
        unsigned = {sympy.sympify(read): symbol for symbol, read in signed.items()}
        meant = {factor: quotient.xreplace(unsigned) for factor, quotient in quotients.items()} | unsigned
        with equated(products):
            token = _environment.set(None if environment is None else _asking(environment, known, meant))
            try:
                yield
            finally:
                _environment.reset(token)


@contextlib.contextmanager
def equated(found: Mapping[sympy.Symbol, Size]) -> Iterator[None]:
    """Symbols that a program cannot run without being equal to some size are read as that size."""
    same = _same.get().sizes
    for symbol, size in found.items():
        size = _read(size, same)
        if symbol not in same and symbol not in size.free_symbols:
            same = {other: _read(known, {symbol: size}) for other, known in same.items()} | {symbol: size}
    token = _same.set(_Same(same))
    try:
        yield
    finally:
        _same.reset(token)


def _divided(known: Iterable[Any]) -> tuple[dict[sympy.Symbol, Size], dict[sympy.Symbol, sympy.Expr]]:
    """Sizes that are known to be multiples of others as products, so that what is left of them is no rounded fraction;
    and what the new factors in these products are."""
    products: dict[sympy.Symbol, Size] = {}
    quotients: dict[sympy.Symbol, sympy.Expr] = {}
    for relation in known:
        if not isinstance(relation, sympy.Eq) or relation.rhs != 0 or not isinstance(relation.lhs, remainders()):
            continue
        number, divisor = (_read(part, _same.get().sizes) for part in relation.lhs.args)
        number, divisor = sympy.fraction(sympy.cancel(number / divisor))
        are_positive = number.is_Symbol and number.is_positive and divisor.is_positive
        if are_positive and number not in divisor.free_symbols:
            quotient = floor_division()(number, divisor)
            factor = sympy.Symbol(str(quotient), integer=True, positive=True)
            products[number], quotients[factor] = divisor * factor, quotient
    return products, quotients


def _signs(environment: Any, known: Iterable[Any]) -> dict[sympy.Symbol, Size]:
    """Numbers that were symbols before anything was known of them, as symbols of the sign that they turned out to have:
    what a program says in Python, as the lengths of sequences, was made with none."""
    symbols = {symbol for relation in known for symbol in relation.free_symbols if symbol.is_integer}
    found: dict[sympy.Symbol, Size] = {}
    for symbol in sorted((symbol for symbol in symbols if not symbol.is_positive), key=str):
        if is_known(environment, sympy.Ge(symbol, 1)):
            found[symbol] = sympy.Symbol(str(symbol), integer=True, positive=True)
        elif symbol.is_nonnegative is None and is_known(environment, sympy.Ge(symbol, 0)):
            found[symbol] = sympy.Symbol(str(symbol), integer=True, nonnegative=True)
    return found


def guarded_alike(environment: Any) -> dict[sympy.Symbol, Size]:
    """Sizes that were found equal to what is computed of others, and of which no less is known than of themselves."""
    same: dict[sympy.Symbol, Size] = {}
    for relation in [] if environment is None else guards(environment):
        if isinstance(relation, sympy.Eq):
            difference = _read(_read(relation.lhs - relation.rhs, _same.get().sizes), same)
            sides = _sides(_signed(difference))
            size, found = sides if sides[0].is_Symbol else sides[::-1]
            if size.is_Symbol and size.is_positive and size not in found.free_symbols and _never_negative(found - 1):
                same = {other: _read(known, {size: found}) for other, known in same.items()} | {size: found}
    return same


def _sides(difference: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Two sums that are equal where their difference is zero, neither with a term that is less than nothing."""
    terms = sympy.expand(difference).as_coefficients_dict().items()
    more, less = ([term * count for term, count in terms if (count > 0) == is_more] for is_more in (True, False))
    return sympy.Add(*more), -sympy.Add(*less)


def _read(size: Size, same: Mapping[sympy.Symbol, Size]) -> sympy.Expr:
    """A size in terms of other symbols, and with every division done that leaves no rest."""
    expression = sympy.sympify(size).xreplace(same)
    rounded = floor_division()
    return expression.replace(rounded, _quotient) if expression.has(rounded) else expression


def _quotient(numerator: sympy.Expr, denominator: sympy.Expr) -> sympy.Expr:
    exact = ratio(numerator, denominator)
    return floor_division()(numerator, denominator) if exact is None else sympy.sympify(exact)


def _asking(environment: Any, known: Iterable[Any], meant: Mapping[sympy.Symbol, sympy.Expr]) -> Asked:
    found = dict.fromkeys(bound for guard in known for bound in _never_negative_where(guard))

    @functools.cache
    def bounds(same: _Same) -> list[sympy.Expr]:
        return [sympy.sympify(same.read(bound)) for bound in found]

    @functools.cache
    def at_most(small: Size, large: Size, same: _Same) -> bool:
        difference = _signed(sympy.sympify(large) - sympy.sympify(small))
        near = (bound for bound in bounds(same) if bound.free_symbols <= difference.free_symbols)
        relation = sympy.Le(small, large).xreplace(meant)
        return is_known(environment, relation) or any(_never_negative(difference - b) for b in near)

    return lambda small, large: at_most(small, large, _same.get())


def _signed(difference: sympy.Expr) -> sympy.Expr:
    """What is left of a difference without its positive factors has the same sign."""
    factors = sympy.Mul.make_args(sympy.factor_terms(difference))
    return sympy.Mul(*(factor for factor in factors if not factor.is_positive))


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
    return _same.get().read(value.node.expr)


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
