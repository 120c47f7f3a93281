"""Refuses sparse_latent_attention, which has no kernel here yet: attention stays one that reads all keys."""

from __future__ import annotations

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.sparse_latent_attention import Arguments
from mla_fx.target import Compiled

from .surface import Surface

OPERATOR = "sparse_latent_attention"


def lower(surface: Surface, a: Arguments) -> Compiled:
    raise NoMatch("no kernel that reads chosen keys is called yet")
