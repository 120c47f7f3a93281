"""Lowers mla_attention.with_lse to its body over contexts in one piece."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_attention import CHOOSES, Arguments, is_absorbed, is_chosen_at_run_time
from mla_fx.ops.emitted.mla_attention_with_lse import body, expanded
from mla_fx.ops.emitted.pages import READS_PAGES, context_of, in_one_piece
from mla_fx.ops.emitted.tiled_attention import goes_by_tiles

from .latent_attention import IN_TILES

OPERATOR = "mla_attention.with_lse"


def lower(a: Arguments) -> Callable[[Arguments], tuple[Tensor, Tensor]]:
    if is_chosen_at_run_time(a):
        raise NoMatch(CHOOSES)
    if a.block_table is not None and is_absorbed(a):
        raise NoMatch(READS_PAGES)
    if goes_by_tiles(a.q_nope, context_of(a.kv_cache, a.block_table)):
        raise NoMatch(IN_TILES)
    return body


def from_copies(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same from a copy of the contexts, with all scores stored at once."""
    a = in_one_piece(a)
    return expanded(a) if is_chosen_at_run_time(a) else body(a)
