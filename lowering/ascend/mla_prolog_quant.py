"""Refuses mla_prolog_quant, a kernel that pypto compiles at run time. torch_npu has no operator for it."""

from __future__ import annotations

from typing import NoReturn

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_prolog_quant.arguments import Arguments
from mla_fx.target import ROUNDS

from .surface import Surface

OPERATOR = "mla_prolog_quant"


def lower(surface: Surface, a: Arguments) -> NoReturn:
    raise NoMatch("torch_npu has no such operator, only pypto has a kernel; mla_prolog_v3 has similar int8 modes")


def refuse_body(a: Arguments) -> None:
    raise NoMatch(ROUNDS)
