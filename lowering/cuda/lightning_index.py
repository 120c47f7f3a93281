"""Lowers lightning_index to index_scores_in_tiles, a Triton kernel that stores one score of a key for all heads, and a
top-k.

Letters are those of `lightning_index`."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted import lightning_index
from mla_fx.ops.emitted.attention.kernel_operands import of_index, strides
from mla_fx.ops.emitted.attention.pages import context_of
from mla_fx.ops.emitted.lightning_index import Arguments, by_rows

from .split_keys import DTYPES, columns_of, places_of_keys

OPERATOR = "lightning_index"
KEYS = 64  # of a program, and
HEADS = 64  # at once
WARPS = 4
AT_ONCE = 2**26  # scores that are held
STRIDES = 3, 2, 2, 1, 3  # of each operand, in the order of the kernel


@triton.jit  # type: ignore[untyped-decorator]  # as is the function: Triton gives types
def score_keys(  # type: ignore[no-untyped-def]
    query, key, weights, table, mask, out,
    query_b, query_s, query_n, key_page, key_row, weights_b, weights_s, table_b, mask_b, mask_s, mask_t,
    S, N, T, page, pages, fill,
    D: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_MASK: tl.constexpr, IS_BOOL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query token and one tile of keys: out [B, S, T]."""
    tiles = tl.cdiv(T, KEYS)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    b, s = token // S, token % S
    t = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)
    is_key = t < T
    place, within, is_page = places_of_keys(table, t, is_key, b, table_b, page, pages, HAS_TABLE)
    column = tl.arange(0, COLUMNS)
    is_column = (column < D)[None, :]
    keys_at = key + (place * key_page + within * key_row)[:, None] + column[None, :]
    keys = tl.load(keys_at, mask=is_page[:, None] & is_column, other=0.0)
    scores = tl.zeros([KEYS], tl.float32)
    for first in range(0, N, HEADS):
        n = first + tl.arange(0, HEADS)
        is_head = n < N
        at = query + b * query_b + s * query_s + n[:, None] * query_n + column[None, :]
        given = tl.load(at, mask=is_head[:, None] & is_column, other=0.0)
        products = tl.dot(keys.to(given.dtype), tl.trans(given), input_precision=PRECISION)
        weight = tl.load(weights + b * weights_b + s * weights_s + n, mask=is_head, other=0.0)
        weighed = tl.where(products <= 0, 0.0, products) * weight[None, :]  # NaN stays NaN
        scores += tl.sum(tl.where(is_head[None, :], weighed, 0.0), 1)
    if HAS_TABLE:  # what the table names outside of the pool is no number
        scores = tl.where(is_page, scores, float("nan"))
    if HAS_MASK:
        shown = tl.load(mask + b * mask_b + s * mask_s + t * mask_t, mask=is_key, other=0)
        if IS_BOOL:
            scores = tl.where(shown != 0, scores, fill)
        else:
            scores += shown
    tl.store(out + token * T + t, scores, mask=is_key)


def lower(a: Arguments) -> Callable[[Arguments], Any]:
    if a.query.device.type != "cuda" or a.query.dtype not in DTYPES:
        raise NoMatch("the kernel is for CUDA devices, and at most 32 bits")
    return in_tiles


def run(a: Arguments) -> tuple[Tensor, Tensor]:
    """Compute lightning_index by the kernel, some query rows at a time."""
    return by_rows(a, index_scores_into, AT_ONCE)


def index_scores_into(a: Arguments, out: Tensor) -> None:
    """Store scores [B, S, T] in float32; lengths are a mask."""
    batch, steps, heads, width = a.query.shape
    context = context_of(a.key, a.block_table)
    *operands, mask = of_index(a)
    given = *operands, None if mask is None else mask.squeeze(2)
    held = [a.query if value is None else value for value in given]  # where there is none, the query is not read
    score_keys[(triton.cdiv(context, KEYS) * batch * steps,)](
        *(value.view(torch.uint8) if value.dtype == torch.bool else value for value in held),
        out,
        *(stride for value, count in zip(given, STRIDES, strict=True) for stride in strides(value, count)),
        *(steps, heads, context, a.key.shape[1], a.key.shape[0], -torch.inf if a.fill is None else a.fill),
        D=width,
        COLUMNS=columns_of(width),
        HEADS=min(HEADS, columns_of(heads)),
        KEYS=KEYS,
        HAS_TABLE=a.block_table is not None,
        HAS_MASK=mask is not None,
        IS_BOOL=mask is not None and mask.dtype == torch.bool,
        PRECISION="ieee",
        num_warps=WARPS,
    )


in_tiles = define_lean_on(
    Arguments, "index_scores_in_tiles", run, lightning_index.fake, returns=("indices", "values"), device="CUDA"
)
