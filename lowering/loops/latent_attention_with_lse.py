"""Lowers latent_attention.with_lse to its body over contexts in one piece."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.latent_attention import Arguments
from mla_fx.ops.emitted.latent_attention_with_lse import body
from mla_fx.ops.emitted.pages import READS_PAGES, in_one_piece

OPERATOR = "latent_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    if a.block_table is not None:
        raise NoMatch(READS_PAGES)
    return body


def from_copies(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same from a copy of the contexts."""
    return body(in_one_piece(a))
