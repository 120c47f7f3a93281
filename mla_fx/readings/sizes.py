"""Sizes: numbers, or expressions over the symbols of a dynamic shape, and what can be proved about them.

Nothing here adds a guard. A symbol has only the assumptions that it was made with (sizes with guards are positive,
others may be anything) and what the graph's shape environment knows about it: ranges, and relations that were
established during tracing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy

from mla_fx.graph.torch_private import floor_division, guards, is_known, remainders

Size: TypeAlias = "int | sympy.Expr"  # a number, or an expression over the symbols of a dynamic shape


@dataclass(frozen=True, eq=False)
class _Facts:
    """What is known about sizes. Sizes are read often, so each expression is read once. A shape environment is slow, so
    it is asked everything once.

    `same` maps symbols to what they are read as; `meant` maps such symbols to those of the environment."""

    same: Mapping[sympy.Symbol, Size] = field(default_factory=dict)
    environment: Any = None
    bounds: Iterable[sympy.Expr] = ()
    meant: Mapping[sympy.Symbol, sympy.Expr] = field(default_factory=dict)

    def equated(self, found: Mapping[sympy.Symbol, Size]) -> _Facts:
        """The same, if the program cannot run unless these symbols equal some size."""
        return replace(self, same=_joined(self.same, found))

    @functools.cached_property
    def read(self) -> Callable[[Any], Size]:
        return functools.cache(lambda expression: plain(_read(expression, self.same)))

    @functools.cached_property
    def at_most(self) -> Callable[[Size, Size], bool]:
        return functools.cache(self._at_most)

    @functools.cached_property
    def _read_bounds(self) -> list[sympy.Expr]:
        return [sympy.sympify(self.read(bound)) for bound in self.bounds]

    def _at_most(self, small: Size, large: Size) -> bool:
        difference = _signed(sympy.sympify(large) - sympy.sympify(small))
        near = (bound for bound in self._read_bounds if bound.free_symbols <= difference.free_symbols)
        relation = sympy.Le(small, large).xreplace(self.meant)
        return is_known(self.environment, relation) or any(_never_negative(difference - bound) for bound in near)


_NOTHING = _Facts()
_facts: ContextVar[_Facts] = ContextVar("what is known of the sizes of this graph", default=_NOTHING)


@contextlib.contextmanager
def size_facts(environment: Any, written: Callable[[], Mapping[sympy.Symbol, Size]] = dict) -> Iterator[None]:
    """Let proofs use what a shape environment and its guards know about symbols. `written` returns sizes that are equal
    because something is written; it is called with what is known until then."""
    guarded = [] if environment is None else guards(environment)
    facts = _NOTHING if environment is None else _facts_of(environment, guarded)
    token = _facts.set(facts)
    try:
        _facts.set(facts := facts.equated(written()))
        _facts.set(facts.equated(_guarded_alike(guarded, facts.same)))
        yield
    finally:
        _facts.reset(token)


def _facts_of(environment: Any, guarded: Sequence[Any]) -> _Facts:
    signed = _signs(environment, guarded)
    same = _joined({}, signed)
    products, quotients = _divided(guarded, same)
    unsigned = {sympy.sympify(read): symbol for symbol, read in signed.items()}
    meant = {factor: quotient.xreplace(unsigned) for factor, quotient in quotients.items()} | unsigned
    bounds = dict.fromkeys(bound for guard in guarded for bound in _never_negative_where(guard))
    return _Facts(_joined(same, products), environment, bounds, meant)


def _joined(same: Mapping[sympy.Symbol, Size], found: Mapping[sympy.Symbol, Size]) -> Mapping[sympy.Symbol, Size]:
    for symbol, size in found.items():
        size = _read(size, same)
        if symbol not in same and symbol not in size.free_symbols:
            same = {other: _read(read, {symbol: size}) for other, read in same.items()} | {symbol: size}
    return same


def _divided(
    relations: Iterable[Any], same: Mapping[sympy.Symbol, Size]
) -> tuple[dict[sympy.Symbol, Size], dict[sympy.Symbol, sympy.Expr]]:
    """Sizes that are known multiples of others, as products, so that the quotient is not a rounded fraction; and the
    new factors in these products."""
    products: dict[sympy.Symbol, Size] = {}
    quotients: dict[sympy.Symbol, sympy.Expr] = {}
    for relation in relations:
        if not isinstance(relation, sympy.Eq) or relation.rhs != 0 or not isinstance(relation.lhs, remainders()):
            continue
        number, divisor = (_read(part, same) for part in relation.lhs.args)
        number, divisor = sympy.fraction(sympy.cancel(number / divisor))
        are_positive = number.is_Symbol and number.is_positive and divisor.is_positive
        if are_positive and number not in divisor.free_symbols:
            quotient = floor_division()(number, divisor)
            factor = sympy.Symbol(str(quotient), integer=True, positive=True)
            products[number], quotients[factor] = divisor * factor, quotient
    return products, quotients


def _signs(environment: Any, relations: Iterable[Any]) -> dict[sympy.Symbol, Size]:
    """Symbols of known sign for symbols that are numbers: those that the program computes in Python, such as lengths of
    sequences, were made without a sign."""
    symbols = {symbol for relation in relations for symbol in relation.free_symbols if symbol.is_integer}
    found: dict[sympy.Symbol, Size] = {}
    for symbol in sorted((symbol for symbol in symbols if not symbol.is_positive), key=str):
        if is_known(environment, sympy.Ge(symbol, 1)):
            found[symbol] = sympy.Symbol(str(symbol), integer=True, positive=True)
        elif symbol.is_nonnegative is None and is_known(environment, sympy.Ge(symbol, 0)):
            found[symbol] = sympy.Symbol(str(symbol), integer=True, nonnegative=True)
    return found


def _guarded_alike(relations: Iterable[Any], before: Mapping[sympy.Symbol, Size]) -> dict[sympy.Symbol, Size]:
    """Symbols that a guard equates with an expression at least as constrained."""
    same: dict[sympy.Symbol, Size] = {}
    for relation in relations:
        if isinstance(relation, sympy.Eq):
            difference = _read(_read(relation.lhs - relation.rhs, before), same)
            sides = _sides(_signed(difference))
            size, found = sides if sides[0].is_Symbol else sides[::-1]
            if size.is_Symbol and size.is_positive and size not in found.free_symbols and _never_negative(found - 1):
                same = {other: _read(read, {size: found}) for other, read in same.items()} | {size: found}
    return same


def _sides(difference: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """The two sums that are equal where their difference is zero, both without negative terms."""
    terms = sympy.expand(difference).as_coefficients_dict().items()
    more, less = ([term * count for term, count in terms if (count > 0) == is_more] for is_more in (True, False))
    return sympy.Add(*more), -sympy.Add(*less)


def _read(size: Size, same: Mapping[sympy.Symbol, Size]) -> sympy.Expr:
    """A size in terms of other symbols, with every division done that leaves no remainder."""
    expression = sympy.sympify(size).xreplace(same)
    rounded = floor_division()
    return expression.replace(rounded, _quotient) if expression.has(rounded) else expression


def _quotient(numerator: sympy.Expr, denominator: sympy.Expr) -> sympy.Expr:
    exact = ratio(numerator, denominator)
    return floor_division()(numerator, denominator) if exact is None else sympy.sympify(exact)


def _signed(difference: sympy.Expr) -> sympy.Expr:
    """A difference without its positive factors, which has the same sign."""
    factors = sympy.Mul.make_args(sympy.factor_terms(difference))
    return sympy.Mul(*(factor for factor in factors if not factor.is_positive))


def _never_negative_where(relation: Any) -> Iterator[sympy.Expr]:
    """What a relation says about integers. The environment itself does not split a conjunction of two."""
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
    return _facts.get().read(value.node.expr)


def plain(size: Size) -> Size:
    """An int if the expression is one: sympy has its own integers."""
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
    """`numerator / denominator` if the division leaves no remainder for any value of the symbols, else None."""
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


def multiples(size: Size, divisor: Size) -> tuple[Size, Size]:
    """The terms of a sum that are multiples of a divisor, divided by it, and the rest of the sum."""
    found = [term for term in sympy.Add.make_args(sympy.expand(size)) if ratio(term, divisor) is not None]
    return plain(sum(ratio(term, divisor) for term in found)), plain(size - sum(found))


def common(one: Size, other: Size) -> Size:
    """The greatest size that provably divides both."""
    return plain(sympy.gcd(one, other))


def at_most(small: Size, large: Size) -> bool:
    """Whether provably `small <= large`, for all values of the symbols."""
    if isinstance(small, int) and isinstance(large, int):
        return small <= large
    if small == large or _never_negative(sympy.sympify(large) - sympy.sympify(small)):
        return True
    facts = _facts.get()
    return facts.environment is not None and facts.at_most(small, large)


@functools.lru_cache(maxsize=4096)
def _never_negative(difference: sympy.Expr) -> bool:
    """Whether it has no negative coefficient, as a polynomial in each symbol's distance from its least value."""
    difference = _without_floors(sympy.expand(difference))
    if difference.is_number:
        return bool(difference >= 0)
    atoms = sympy.Poly(difference).gens if difference.is_polynomial() else ()
    least = {atom: _least(atom) for atom in atoms}
    if not atoms or None in least.values():
        return bool(difference.is_nonnegative)
    above = {atom: sympy.Dummy(nonnegative=True) for atom in atoms}
    shifted = sympy.Poly(difference.subs({atom: above[atom] + least[atom] for atom in atoms}), *above.values())
    return all(coefficient >= 0 for coefficient in shifted.coeffs())


def _without_floors(difference: sympy.Expr) -> sympy.Expr:
    """A bound from below: what is rounded down before it is subtracted is at most the quotient."""
    for floor in difference.atoms(floor_division()):
        numerator, divisor = floor.args
        times = difference.coeff(floor)
        if times.is_negative and divisor.is_positive:
            difference = sympy.expand(difference + times * (numerator / divisor - floor))
    return difference


def _least(atom: sympy.Expr) -> int | None:
    if atom.is_positive:
        return 1
    return 0 if atom.is_nonnegative else None
