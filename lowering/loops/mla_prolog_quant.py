"""Keeps calls of mla_prolog_quant."""

from __future__ import annotations

from typing import NoReturn

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_prolog_quant.arguments import Arguments
from mla_fx.target import ROUNDS

OPERATOR = "mla_prolog_quant"


def lower(a: Arguments) -> NoReturn:
    raise NoMatch(ROUNDS)
