"""Numbers in place of symbols: sizes that are known at run time only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import sympy
import torch
from torch import Tensor

from mla_fx.graph.torch_private import hint_of

UNKNOWN = 8  # for a symbol that is the size of nothing


class Numbers:
    """A number for each symbol: the one that the compiler has seen. With `apart`, it is multiplied by a prime: then no
    symbol has the number of another size, and each keeps its divisors."""

    def __init__(self, values: Iterable[Any], *, apart: bool) -> None:
        primes = (number for number in itertools.count(11, 2) if sympy.isprime(number))
        sizes = list(_symbolic(values))
        seen = {size.node.expr: hint_of(size) for size in sizes}
        self.are_plain = not sizes  # a symbol that became a number is none of the symbols, and still no int
        self.symbols: dict[sympy.Symbol, int] = {}
        for symbol in dict.fromkeys(symbol for size in sizes for symbol in size.node.expr.free_symbols):
            number = seen.get(symbol, UNKNOWN)
            self.symbols[symbol] = number * next(primes) if apart else number
        self.found: dict[Any, int] = {}

    def of(self, value: Any) -> Any:
        """A tensor as its shape, and a size as a number; also in lists."""
        if isinstance(value, Tensor):
            return tuple(value.shape) if self.are_plain else tuple(map(self.of, value.shape))
        if isinstance(value, (list, tuple)):
            return [self.of(part) for part in value]
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression not in self.found:
            self.found[expression] = int(expression.xreplace(self.symbols))
        return self.found[expression]


def _symbolic(values: Iterable[Any]) -> Iterator[torch.SymInt]:
    for value in values:
        if isinstance(value, torch.SymInt):
            yield value
        elif isinstance(value, Tensor):
            sizes: Iterable[Any] = value.shape
            yield from (size for size in sizes if isinstance(size, torch.SymInt))
        elif isinstance(value, (list, tuple)):
            yield from _symbolic(value)
