"""Keeps sparse_mla_attention as a call, which takes some query rows at a time."""

from __future__ import annotations

from torch import Tensor

from mla_fx.ops.emitted.sparse_mla_attention import Arguments, over_all

from . import mla_attention

OPERATOR = "sparse_mla_attention"
STAYS = "it takes some query rows at a time; a compiler would copy the chosen keys of all of them"


def from_copies(a: Arguments) -> Tensor:
    """The same as attention to all keys under a mask."""
    return mla_attention.from_copies(over_all(a))
