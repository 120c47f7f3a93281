"""Lowers lightning_index to index_scores, a kernel that stores one score of a key for all heads, and a top-k."""

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import lightning_index
from mla_fx.ops.emitted.attention.kernel_operands import of_index
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.tiles import count_of_scores
from mla_fx.ops.emitted.lightning_index import Arguments, by_rows

from . import costs
from .attention_over_rows import DTYPES
from .built import built

OPERATOR = "lightning_index"
CALL = struct.Struct("6q18qd")  # `Call` in the C++ file
AT_ONCE = 2**22  # scores that are held


def lower(a: Arguments) -> Callable[[Arguments], Any]:
    if a.query.device.type != "cpu" or a.query.dtype not in DTYPES:
        raise NoMatch("the kernel is for CPUs, and at most 32 bits")
    count = count_of_scores(a.query, context_of(a.key, a.block_table))
    if count is not None and count <= costs.of_loops(costs.SCORES_OF_AN_INDEXER, a.key.dtype):
        raise NoMatch("loops are as fast for few keys")
    if _library() is None:
        raise NoMatch("its C++ kernel was not built")
    return in_rows


def _library() -> Any:
    return built(__file__, "the choice of keys", "index_scores")


def run(a: Arguments) -> tuple[Tensor, Tensor]:
    """Compute lightning_index by the kernel, some query rows at a time."""
    if a.query.dtype not in DTYPES or _library() is None:  # the check of a rewrite computes in float64
        return lightning_index.body(a)
    if a.block_table is not None:
        lightning_index.check(a)  # the kernel reads what the table names
    return by_rows(a, index_scores_into, AT_ONCE)


def index_scores_into(a: Arguments, out: Tensor) -> None:
    """Store scores [B, S, T] in float32; lengths are a mask."""
    batch, steps, heads, width = a.query.shape
    context = context_of(a.key, a.block_table)
    query, key, weights, table, mask = of_index(a)
    held = query, key, weights, table, mask, out  # until the kernel has run
    call = CALL.pack(
        *(0 if value is None else value.data_ptr() for value in held),
        *(batch, steps, heads, context, width),
        *(*query.stride()[:3], *key.stride()[:2], key.shape[0]),
        *(key.shape[1], *((0, False) if table is None else (table.stride(0), table.dtype == torch.int32))),
        *((0, 0, 0, False) if mask is None else (*mask.stride()[:2], mask.stride(3), mask.dtype == torch.bool)),
        -torch.inf if a.fill is None else a.fill,
    )
    _library().index_scores(call, DTYPES[query.dtype])


in_rows = define_lean_on(Arguments, "index_scores_in_rows", run, lightning_index.fake, returns=("indices", "values"))
