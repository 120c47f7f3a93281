"""attention_over_rows: attention over latents in one kernel, which reads only rows of a pool that some query sees."""

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import HEADS, HIDING, RESULTS, Arguments, Results
from mla_fx.ops.emitted.attention.chosen_rows import over_rows
from mla_fx.ops.emitted.attention.codes import CODES, SCALES, dtype_of, kind_of
from mla_fx.ops.emitted.attention.kernel_operands import (
    asked,
    in_rows,
    lengths_of,
    mask_of,
    results,
    scales_of,
    strides,
    tile_of,
)
from mla_fx.ops.emitted.attention.latents import of_queries, over_latents
from mla_fx.ops.emitted.attention.operator import check
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.attention.softmax import share
from mla_fx.ops.emitted.attention.tiles import count_of_scores

from . import costs
from .built import built

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CALL = struct.Struct("55q3d")  # `Call` in the C++ file
TAKES = (*HEADS, *HIDING, *SCALES.values(), "fill", "sinks", "block_table", "indices", "lens", "return_lse")
LARGEST = torch.finfo(torch.float32).max


def check_served(a: Arguments) -> None:
    """Raise NoMatch for a call that the kernel is not for. Loops are as fast for few keys in one piece, which they read
    where they lie, and a library is for products of float32 (measured)."""
    dtype = a.query.dtype if a.kv_cache.dtype in CODES else a.kv_cache.dtype
    if a.query.device.type != "cpu" or dtype not in DTYPES or a.kv_cache.dim() != 3:
        raise NoMatch("the kernel is for CPUs, caches of rows, and at most 32 bits")
    scores = count_of_scores(a.query, context_of(a.kv_cache, a.block_table))
    is_small = scores is not None and scores <= costs.of_loops(costs.SCORES_IN_ONE_PIECE, dtype)
    if a.block_table is None and a.indices is None and (is_small or dtype != torch.bfloat16):
        raise NoMatch("for contexts in one piece, the kernel is for many scores of bfloat16")
    if not is_built():
        raise NoMatch("its C++ kernel was not built")


def is_built() -> bool:
    """Whether there is the kernel."""
    return _library() is not None


def _library() -> Any:
    return built(__file__, "attention over pages", "attention_over_rows")


def run(a: Arguments) -> Results:
    """Compute attention without weights."""
    if a.indices is not None:
        return of_queries(run(over_rows(a)), a)
    if dtype_of(a) not in DTYPES or not is_built():  # the check of a rewrite computes in float64
        return over_latents(a)
    out, lse = results(a)
    run_into(a, out, lse)
    return out, lse if a.return_lse else lse.new_empty(0)


def run_into(
    a: Arguments, out: Tensor, lse: Tensor, values: Tensor | None = None, starts: Tensor | None = None
) -> None:
    """Compute both; the logarithms leave out sinks.

    With values [B, N, T, V], kv_cache has keys of each head, [B, N, T, R].
    With starts, int64 [B + 1], sequences lie one behind the other in memory: b has the rows from starts[b] to
    starts[b + 1] of queries, keys, values and results. S is the most tokens of one, and T as many keys."""
    if out.numel() == 0:
        return
    rope = None if a.query_rope is None else a.query_rope.to(a.query.dtype)
    query, rope, kv_cache, kr_cache, table = map(in_rows, (a.query, rope, a.kv_cache, a.kr_cache, a.block_table))
    sinks, values = None if a.sinks is None else a.sinks.float().contiguous(), in_rows(values)
    hidden = lengths_of(a), mask_of(a)
    scales = scales_of(a.kv_scales, kv_cache), scales_of(a.kr_scales, kr_cache)
    held = query, rope, kv_cache, kr_cache, table, *hidden, sinks, values, out, lse, starts, *scales  # while it runs
    if _library().attention_over_rows(_call(a, held), DTYPES[out.dtype]):
        check(a)  # which says what is wrong with the table


def _call(a: Arguments, held: Sequence[Tensor | None]) -> bytes:
    """`Call` of the C++ file. The operands are in its order."""
    query, query_rope, kv_cache, kr_cache, table, lengths, mask, _, values, out, _, _, kv_scales, kr_scales = held
    assert query is not None and kv_cache is not None and out is not None
    batch, steps, heads, rank = query.shape
    context = context_of(kv_cache, table)
    return CALL.pack(
        *(0 if value is None else value.data_ptr() for value in held),
        *(batch, steps, heads, context, rank, 0 if query_rope is None else query_rope.shape[3], out.shape[-1]),
        *(*strides(query, 3), *strides(query_rope, 3)),
        *(kv_cache.stride(0), kv_cache.stride(-2), kv_cache.shape[0]),
        *(*strides(kr_cache, 2), 0 if kr_cache is None else kr_cache.shape[0]),
        *(kv_cache.shape[-2], *strides(table, 1), table is not None and table.dtype == torch.int32),
        *strides(lengths, 1),
        *(*strides(mask, 4), mask is not None and mask.dtype == torch.bool),
        *((0,) * 4 if values is None else (kv_cache.stride(1), *values.stride()[:3])),
        *(*strides(kv_scales, 2), tile_of(kv_scales, kv_cache), *strides(kr_scales, 2), tile_of(kr_scales, kr_cache)),
        *(a.fill is not None, query.dtype != out.dtype, 0 if kv_scales is None else kind_of(kv_cache)),
        *(a.scale, 0.0 if a.fill is None else min(max(a.fill, -LARGEST), LARGEST), share(context)),
    )


attend = define_lean_on(Arguments, "attention_over_rows", run, asked, returns=RESULTS)
