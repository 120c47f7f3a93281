"""Refuses sparse_mla_attention: prompts attend to all keys under a mask."""

from __future__ import annotations

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.sparse_mla_attention import Arguments
from mla_fx.target import Compiled

from .surface import Surface

OPERATOR = "sparse_mla_attention"


def lower(surface: Surface, a: Arguments) -> Compiled:
    raise NoMatch("no kernel attends to chosen keys with queries that are not absorbed")
