"""Attention over latents in Triton: programs take parts of the keys, so that few queries keep all of a device busy, and
a second kernel joins the parts.

Letters: B sequences, S query tokens, N heads, M = S * N query rows of a sequence, T keys, R columns of a latent, Dr
rotary columns, P parts. A latent is loaded once, for the scores and as a value."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.lean import define_lean_on
from mla_fx.ops.emitted.attention.arguments import HIDING, RESULTS, Arguments, Results, refuse_others
from mla_fx.ops.emitted.attention.chosen_rows import over_rows
from mla_fx.ops.emitted.attention.codes import CODES, SCALES, kind_of
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
from mla_fx.ops.emitted.attention.latents import of_queries
from mla_fx.ops.emitted.attention.pages import context_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_COLUMNS = 512  # of latents: sums of more do not fit the registers
MOST_TOKENS = 16  # of a sequence; more are a prompt, which multiplies more than it reads
FEWEST = 16  # rows and columns of a product in Triton
ROWS = 16  # of a program, and
KEYS = 16  # of a tile, for 512 columns: with twice as many of either, registers spill
TILE = 128  # columns that share a scale, at most
WARPS = 8
PER_PROCESSOR = 2  # programs for each multiprocessor
TAKES = (*HIDING, *SCALES.values(), "fill", "sinks", "block_table", "return_lse")
STRIDES = 3, 3, 2, 2, 1, 1, 4, 2, 2  # of each operand, in the order of the kernel


@triton.jit  # type: ignore[untyped-decorator]  # as is the function: Triton gives types
def places_of_keys(  # type: ignore[no-untyped-def]
    table, t, is_key, b, table_b, page, pages, HAS_TABLE: tl.constexpr
):  # fmt: skip
    """The page of each key t of sequence b, its row there, and whether the table names one of the pages."""
    place, within, is_page = b, t, is_key
    if HAS_TABLE:
        place = tl.load(table + b * table_b + t // page, mask=is_key, other=0).to(tl.int64)
        place = tl.where(place < 0, place + pages, place)
        within = t % page
        is_page = is_key & (place >= 0) & (place < pages)
    return place, within, is_page


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(  # type: ignore[no-untyped-def]
    code, scales, column, is_page, CODES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Codes [KEYS, COLUMNS] times their scales, in float32: int8, or bytes of float8_e4m3fn or float8_e5m2. Not all
    devices have these types, but all have float16: e5m2 is its upper byte, and e4m3 moved there is less by 256."""
    if CODES == 1:
        number = code.to(tl.float32)
    elif CODES == 2:
        magnitude = (code & 0x7F).to(tl.uint16)
        half = ((code & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.where(magnitude == 0x7F, float("nan"), number)
    else:
        number = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    columns: tl.constexpr = column.shape[0]
    if columns % TILE == 0:
        tile = tl.arange(0, columns // TILE)
        is_tile = tile * TILE < COUNT
        by = tl.load(scales[:, None] + tile[None, :] * STEP, mask=is_page[:, None] & is_tile[None, :], other=0.0)
        tiles = tl.reshape(number, [number.shape[0], columns // TILE, TILE]) * by[:, :, None]
        number = tl.reshape(tiles, [number.shape[0], columns])
    else:
        is_column = column < COUNT
        at = scales[:, None] + column[None, :] // TILE
        number = number * tl.load(at, mask=is_page[:, None] & is_column[None, :], other=0.0)
    return number


@triton.jit  # type: ignore[untyped-decorator]
def attend_to_part(  # type: ignore[no-untyped-def]
    query, query_rope, kv_cache, kr_cache, table, lengths, mask, kv_scales, kr_scales, outs, lses,
    query_b, query_s, query_n, rope_b, rope_s, rope_n, kv_page, kv_row, kr_page, kr_row,
    table_b, lengths_b, mask_b, mask_n, mask_s, mask_t,
    kv_scale_page, kv_scale_row, kr_scale_page, kr_scale_row,
    S, N, T, page, pages, parts, scale, fill,
    R: tl.constexpr, DR: tl.constexpr, COLUMNS: tl.constexpr, ROTARY: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_TABLE: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_FILL: tl.constexpr,
    HAS_MASK: tl.constexpr, IS_BOOL: tl.constexpr, IS_ABSORBED: tl.constexpr, PRECISION: tl.constexpr,
    KV_CODES: tl.constexpr, KV_TILE: tl.constexpr, KV_STEP: tl.constexpr,
    KR_CODES: tl.constexpr, KR_TILE: tl.constexpr, KR_STEP: tl.constexpr,
):  # fmt: skip
    """One block of query rows of one sequence, and one part of its keys: outs [B, M, P, R], lses [B, M, P]."""
    b = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, n, is_row = row // N, row % N, row < S * N
    column = tl.arange(0, COLUMNS)
    is_column = column < R
    at = query + b * query_b + s[:, None] * query_s + n[:, None] * query_n + column[None, :]
    given = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
    if ROTARY > 0:
        turned = tl.arange(0, ROTARY)
        is_turned = turned < DR
        at = query_rope + b * rope_b + s[:, None] * rope_s + n[:, None] * rope_n + turned[None, :]
        given_rope = tl.load(at, mask=is_row[:, None] & is_turned[None, :], other=0.0)
    if IS_ABSORBED:  # a query in float32 of latents in float16, which holds it if each row is divided by a power of two
        most = tl.max(tl.abs(given), 1)
        if ROTARY > 0:
            most = tl.maximum(most, tl.max(tl.abs(given_rope), 1))
        power = tl.exp2(tl.ceil(tl.log2(tl.where(most == 0, 1.0, most))))
        given = (given / power[:, None]).to(tl.float16)
        if ROTARY > 0:
            given_rope = (given_rope / power[:, None]).to(tl.float16)
    length = T
    if HAS_LENGTHS:
        length = tl.load(lengths + b * lengths_b)
    seen = tl.minimum(tl.maximum(length - S + 1 + s, 0), T)
    read = T
    if HAS_LENGTHS and not HAS_FILL:
        read = tl.max(tl.where(is_row, seen, 0), 0)
    size = tl.cdiv(tl.cdiv(read, parts), KEYS) * KEYS
    first = part * size
    last = tl.minimum(first + size, read)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, KEYS):
        t = start + tl.arange(0, KEYS)
        is_key = t < last
        place, within, is_page = places_of_keys(table, t, is_key, b, table_b, page, pages, HAS_TABLE)
        latents_at = kv_cache + (place * kv_page + within * kv_row)[:, None] + column[None, :]
        latent = tl.load(latents_at, mask=is_page[:, None] & is_column[None, :], other=0)
        if KV_CODES > 0:
            scales_at = kv_scales + place * kv_scale_page + within * kv_scale_row
            latent = numbers_of(latent, scales_at, column, is_page, KV_CODES, KV_TILE, KV_STEP, R)
        latent = latent.to(given.dtype)
        scores = tl.dot(given, tl.trans(latent), input_precision=PRECISION)
        if ROTARY > 0:
            keys_at = kr_cache + (place * kr_page + within * kr_row)[:, None] + turned[None, :]
            key = tl.load(keys_at, mask=is_page[:, None] & is_turned[None, :], other=0)
            if KR_CODES > 0:
                key_scales_at = kr_scales + place * kr_scale_page + within * kr_scale_row
                key = numbers_of(key, key_scales_at, turned, is_page, KR_CODES, KR_TILE, KR_STEP, DR)
            scores += tl.dot(given_rope, tl.trans(key.to(given_rope.dtype)), input_precision=PRECISION)
        if IS_ABSORBED:
            scores = scores * power[:, None]
        scores = scores * scale
        if HAS_TABLE:  # what the table names outside of the pool is no number
            scores = tl.where(is_page[None, :], scores, float("nan"))
        if HAS_LENGTHS:
            scores = tl.where(t[None, :] < seen[:, None], scores, fill)
        if HAS_MASK:
            mask_at = mask + b * mask_b + s[:, None] * mask_s + n[:, None] * mask_n + t[None, :] * mask_t
            shown = tl.load(mask_at, mask=is_row[:, None] & is_key[None, :], other=0)
            if IS_BOOL:
                scores = tl.where(shown != 0, scores, fill)
            else:
                scores = tl.where(shown == float("-inf"), float("-inf"), scores + shown)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        now = tl.maximum(maximum, tl.max(scores, 1))
        safe = tl.where(now == float("-inf"), 0.0, now)
        shrink = tl.exp(maximum - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        more = tl.dot(weights.to(latent.dtype), latent, input_precision=PRECISION)
        sums = sums * shrink[:, None] + more
        maximum = now
    to = (b * S * N + row) * parts + part
    out = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(outs + to[:, None] * R + column[None, :], out, mask=is_row[:, None] & is_column[None, :])
    lse = tl.where(maximum == float("inf"), maximum, maximum + tl.log(total))
    tl.store(lses + to, lse, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def join_parts(  # type: ignore[no-untyped-def]
    outs, lses, sinks, out, lse, N, parts,
    R: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One query row of all sequences: out [B, M, R], lse [B, M]. A sink is one more score, which lse leaves out."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    given = tl.load(lses + row * parts + part, mask=part < parts, other=float("-inf"))
    largest = tl.max(given, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(given - safe), 0)
    tl.store(lse + row, tl.where(largest == float("inf"), largest, safe + tl.log(total)))
    if HAS_SINKS:
        sink = tl.load(sinks + row % N).to(tl.float32)
        above = tl.maximum(safe, sink)
        total = total * tl.exp(safe - above) + tl.exp(sink - above)
        safe = above
    sums = tl.zeros([COLUMNS], tl.float32)
    for number in range(parts):
        share = tl.exp(tl.load(lses + row * parts + number) - safe)
        at = outs + (row * parts + number) * R + column
        sums += tl.where(share == 0, 0.0, share * tl.load(at, mask=column < R, other=0.0))
    tl.store(out + row * R + column, sums / tl.where(total == 0, 1.0, total), mask=column < R)


def check_served(a: Arguments, tokens: int, *absorbed: str) -> None:
    """Raise NoMatch for a call that the kernel is not for. `tokens` of a sequence share their keys. The arguments in
    `absorbed` are gone when it runs."""
    refuse_others(a, "the kernel", *TAKES, *absorbed)
    kv_cache = a.kv_cache
    if kv_cache.device.type != "cuda":
        raise NoMatch("the kernel is for CUDA devices")
    if kv_cache.dtype not in (*DTYPES, *CODES) or kv_cache.dim() != 3:
        raise NoMatch("the kernel is for caches of rows, and at most 32 bits")
    rank = kv_cache.shape[2]
    if not isinstance(rank, int) or rank > MOST_COLUMNS:
        raise NoMatch(f"the kernel is for at most {MOST_COLUMNS} columns of a latent")
    if isinstance(tokens, int) and tokens > MOST_TOKENS:
        raise NoMatch(f"the kernel is for at most {MOST_TOKENS} new tokens of a sequence")


def run(a: Arguments) -> Results:
    """Compute attention without weights."""
    if a.indices is not None:
        return of_queries(run(over_rows(a)), a)
    out, lse = results(a)
    if out.numel() > 0:
        run_into(a, out, lse)
    return out, lse if a.return_lse else lse.new_empty(0)


def run_into(a: Arguments, out: Tensor, lse: Tensor) -> None:
    """Compute both; the logarithms leave out sinks."""
    batch, steps, heads, rank = a.query.shape
    rows, context = steps * heads, context_of(a.kv_cache, a.block_table)
    blocks = triton.cdiv(rows, ROWS)
    parts = count_of_parts(batch * blocks, context, a.query.device)
    outs, lses = lse.new_empty(batch, rows, parts, rank), lse.new_empty(batch, rows, parts)
    given = operands(a)
    attend_to_part[(blocks, parts, batch)](
        *(a.query if value is None else value for value in given),  # where there is none, the query is not read
        *(outs, lses),
        *(stride for value, count in zip(given, STRIDES, strict=True) for stride in strides(value, count)),
        *(steps, heads, context, a.kv_cache.shape[1], a.kv_cache.shape[0], parts),
        *(a.scale, float("-inf") if a.fill is None else a.fill),
        **constants(a, given),
        num_warps=WARPS,
    )
    sinks = lses if a.sinks is None else a.sinks.contiguous()
    powers = columns_of(rank), triton.next_power_of_2(parts)
    join_parts[(batch * rows,)](outs, lses, sinks, out, lse, heads, parts, rank, *powers, a.sinks is not None)


def count_of_parts(tasks: int, context: int, device: torch.device) -> int:
    """So many parts that all multiprocessors are busy, of at least one tile of keys."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = triton.cdiv(PER_PROCESSOR * processors, tasks)
    return max(1, min(int(wanted), -(-context // KEYS)))


def operands(a: Arguments) -> tuple[Tensor | None, ...]:
    """The tensors in the order of the kernel."""
    rope = None if a.query_rope is None else a.query_rope.to(a.query.dtype)
    mask = mask_of(a)
    shown = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
    caches = [in_rows(_as_bytes(cache)) for cache in (a.kv_cache, a.kr_cache)]
    scales = scales_of(a.kv_scales, a.kv_cache), scales_of(a.kr_scales, a.kr_cache)
    return in_rows(a.query), in_rows(rope), *caches, _table(a), lengths_of(a), shown, *scales


def _table(a: Arguments) -> Tensor | None:
    """Codes in one piece are pages, too: one for each sequence. For these, the compiler spills fewer registers."""
    if a.kv_scales is None or a.block_table is not None:
        given: Tensor | None = in_rows(a.block_table)
        return given
    return torch.arange(a.kv_cache.shape[0], dtype=torch.int32, device=a.kv_cache.device).unsqueeze(1)


def _as_bytes(cache: Tensor | None) -> Tensor | None:
    """Float8 as bytes, which all devices read."""
    return cache if cache is None or cache.dtype not in CODES[1:] else cache.view(torch.uint8)


def constants(a: Arguments, given: Sequence[Tensor | None]) -> dict[str, Any]:
    rank, rotary = a.query.shape[3], 0 if a.query_rope is None else a.query_rope.shape[3]
    *_, table, lengths, mask, kv_scales, kr_scales = given
    return {
        "R": rank,
        "DR": rotary,
        "COLUMNS": columns_of(rank),
        "ROTARY": 0 if rotary == 0 else columns_of(rotary),
        "ROWS": ROWS,
        "KEYS": KEYS,
        "HAS_TABLE": table is not None,
        "HAS_LENGTHS": lengths is not None,
        "HAS_FILL": a.fill is not None,
        "HAS_MASK": mask is not None,
        "IS_BOOL": mask is not None and mask.dtype == torch.uint8,
        "IS_ABSORBED": a.query.dtype == torch.float32 and a.kv_cache.dtype == torch.float16,
        "PRECISION": "ieee",
        **_tiles("KV", kv_scales, a.kv_cache),
        **_tiles("KR", kr_scales, a.kr_cache),
    }


def _tiles(name: str, scales: Tensor | None, cache: Tensor | None) -> dict[str, int]:
    """The kind of codes, the columns that share a scale, and the step from one scale to the next. A scale of all
    columns is read for several tiles: with one tile, registers spill."""
    if scales is None or cache is None:
        return {f"{name}_CODES": 0, f"{name}_TILE": 0, f"{name}_STEP": 0}
    tile, step = tile_of(scales, cache), 1
    if tile == cache.shape[-1]:
        tile, step = min(columns_of(tile), TILE), 0
    return {f"{name}_CODES": kind_of(cache), f"{name}_TILE": tile, f"{name}_STEP": step}


def columns_of(count: int) -> int:
    """The columns that a product in Triton has for so many."""
    return max(FEWEST, int(triton.next_power_of_2(count)))


attend = define_lean_on(Arguments, "attention_over_split_keys", run, asked, returns=RESULTS, device="CUDA")
