"""Attention in parts, merged by the logarithms of their sums."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from mla_fx.ops.common.math import nan_where_blind

from .plan import Call, Expression, Inlined


def merged(
    outs: Sequence[Expression], lses: Sequence[Expression], blanks: Iterable[Expression], blank_if_empty: bool
) -> Expression:
    """A call of merge_attention. Rows are NaN that have minus infinity among `blanks`, logarithms of some parts, and if
    `blank_if_empty` rows that no part sees; others that no part sees are zero."""
    call = Call(torch.ops.mla_fx.merge_attention.default, outs, lses)
    value: Expression = Call(operator.getitem, call, 0)
    blanks = list(blanks)
    if blank_if_empty and not blanks:
        blanks.append(Call(operator.getitem, call, 1))
    for blank in blanks:
        value = Inlined(nan_where_blind, (value, blank))
    return value
