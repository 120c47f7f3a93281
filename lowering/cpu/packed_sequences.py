"""Packed sequences by attention_over_rows: keys and values are expanded for many short sequences at once."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import RESULTS, Arguments, Results
from mla_fx.ops.emitted.attention.kernel_operands import in_rows
from mla_fx.ops.emitted.attention.operator import fake, kernel
from mla_fx.ops.emitted.attention.parts import of_packed, sequences
from mla_fx.target import Compiled

from . import attention_over_rows, heads_over_rows


def lower(a: Arguments) -> Compiled:
    if not heads_over_rows.is_fast(a):
        raise NoMatch("loops are for other dtypes and machines")
    return by_call


def _run(a: Arguments) -> Results:
    if not heads_over_rows.is_fast(a):  # the check of a rewrite computes in float64
        return kernel(a)
    assert a.lens is not None, "sequences are packed"
    (out, no_sums), first = fake(a), 0
    most = heads_over_rows.EXPANDED // sum(weight.shape[0] * weight.shape[1] for weight in a.weights)
    if out.shape[1] <= most:  # cutting takes as long as a small call
        _attend(a, out)
        return out, no_sums
    for lens in _groups(a.lens, most):
        own, first = slice(first, first + sum(lens)), first + sum(lens)
        _attend(of_packed(a, own, lens), out[:, own])
    return out, no_sums


def _groups(lens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Neighbours that have at most so many tokens together, or one that has more."""
    some = list[int]()
    for length in lens:
        if some and sum(some) + length > most:
            yield some
            some = []
        some.append(length)
    yield some


def _attend(a: Arguments, out: Tensor) -> None:
    assert a.lens is not None, "sequences are packed"
    if len(a.lens) == 1:  # which may be long
        out.copy_(heads_over_rows.attend(next(sequences(a)))[0])
        return
    weight_uk, weight_uv = a.weights
    count, most, (heads, nope, _), width = len(a.lens), max(a.lens), weight_uk.shape, weight_uv.shape[1]
    both = linear(a.kv_cache[0], heads_over_rows.one_weight(weight_uk, weight_uv).flatten(0, 1))

    # As many rows for each sequence as the longest has, from the first one on: the kernel adds where it starts.
    def of_each(value: Tensor | None) -> Any:
        value = None if value is None else in_rows(value[0])
        return value if value is None else value.as_strided([count, most, *value.shape[1:]], [0, *value.stride()])

    def of_heads(columns: int, first: int) -> Tensor:
        return both.as_strided([count, heads, most, columns], [0, nope + width, both.shape[1], 1], first)

    rows = {name: of_each(getattr(a, name)) for name in ("query", "query_rope", "kr_cache")}
    own = replace(a, **rows, kv_cache=of_heads(nope, 0), weight_uk=None, weight_uv=None, lens=None)
    lse, starts = out.new_empty(out.shape[1:3], dtype=torch.float32), torch.tensor([0, *accumulate(a.lens)])
    attention_over_rows.run_into(own, out[0], lse, of_heads(width, nope), starts)


by_call = define_lean_on(Arguments, "packed_mla_attention_over_rows", _run, fake, returns=RESULTS)
