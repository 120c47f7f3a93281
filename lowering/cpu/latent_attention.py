"""Lowers latent_attention to attention_over_rows, or to loops over copies of few keys."""

from __future__ import annotations

from mla_fx.ops.emitted.latent_attention import Arguments
from mla_fx.ops.emitted.pages import context_of
from mla_fx.ops.emitted.tiled_attention import count_of_scores
from mla_fx.target import Compiled

from ..loops.latent_attention import from_copies
from . import chosen_keys
from .attention_over_rows import MANY_SCORES, attend, check_served

OPERATOR = "latent_attention"
FEW_SCORES = 2**13  # measured: with fewer, a call takes longer than loops that are compiled with what is around them
FEW_KEYS = 2**8  # measured: with fewer, copying them takes less time than a call


def lower(a: Arguments) -> Compiled:
    if a.indices is not None:
        check_served(a.query, a.kv_cache, a.indices)
        return chosen_keys.attend
    check_served(a.query, a.kv_cache, a.block_table)
    context = context_of(a.kv_cache, a.block_table)
    scores = count_of_scores(a.query, context)
    is_small = scores is not None and scores <= (MANY_SCORES if context <= FEW_KEYS else FEW_SCORES)
    return from_copies if is_small and not a.return_lse else attend
