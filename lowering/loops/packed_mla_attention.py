"""Lowers packed_mla_attention to mla_attention of each sequence."""

from __future__ import annotations

from torch import Tensor

from mla_fx.ops.emitted.packed_mla_attention import Arguments, one_by_one, sequences
from mla_fx.target import Compiled

from . import mla_attention

OPERATOR = "packed_mla_attention"


def lower(a: Arguments) -> Compiled:
    for sequence in sequences(a):
        mla_attention.lower(sequence)  # or it raises NoMatch
    return compiled


def compiled(a: Arguments) -> Tensor:
    return one_by_one(a, mla_attention.compiled)


def from_copies(a: Arguments) -> Tensor:
    return one_by_one(a, mla_attention.from_copies)
