"""Refuses lightning_index, which calls no kernel here yet: the body is converted."""

from __future__ import annotations

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.lightning_index import Arguments
from mla_fx.target import Compiled

from .surface import Surface

OPERATOR = "lightning_index"


def lower(surface: Surface, a: Arguments) -> Compiled:
    raise NoMatch("no kernel that chooses keys is called yet")
