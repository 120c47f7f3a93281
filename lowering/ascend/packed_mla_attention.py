"""Refuses packed_mla_attention: each sequence is a call of its own."""

from __future__ import annotations

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.packed_mla_attention import Arguments
from mla_fx.target import Compiled

from .surface import Surface

OPERATOR = "packed_mla_attention"


def lower(surface: Surface, a: Arguments) -> Compiled:
    raise NoMatch("packed sequences are attended to one by one")
