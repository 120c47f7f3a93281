"""What FusedInferAttentionScore does not allow, from its documents: in any release as errors, and by release."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

TABLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYOUTS = ("BSND", "BNSD", "TND")  # those that the package uses
CHANNELS = ("key_antiquant_scale", "value_antiquant_scale", "key_antiquant_offset", "value_antiquant_offset")
UNSUPPORTED = ("pse_shift", "query_padding_size", "kv_padding_size", "key_shared_prefix", "dequant_scale_query")


def complaints(kernel: str, a: dict[str, Any], release: str) -> list[str]:
    """A sentence for each size of a call with ropes, and for pages that the oldest release does not take. `a` are the
    inputs by name, and the attributes."""
    if a.get("query_rope") is None:
        return []
    is_latent = a.get("block_table") is not None
    allowed = {"query": 512 if is_latent else 128, "query_rope": 64, "value": 128}
    found = {name: a[name].shape[-1] for name in ("query", "query_rope")}
    if not is_latent:
        found["value"] = a["value"][0].shape[-1]
    sizes = [
        f"{kernel}: a head of {name} has {size} columns; CANN {release} takes {allowed[name]}"
        for name, size in found.items()
        if size != allowed[name]
    ]
    return sizes + _of_old_pages(kernel, a, release) if is_latent and release == "8.5.0.alpha001" else sizes


def _of_old_pages(kernel: str, a: dict[str, Any], release: str) -> list[str]:
    """CheckFeatureMlaNoquantPa and CheckFeatureMlaNoQuantLayout, as they were."""
    size, layout, is_nz = a["block_size"], a["input_layout"], a["key"][0].ndim == 5
    found = []
    if size not in ((128,) if is_nz else (16, 128)):
        found.append(f"{kernel}: block_size is {size}; CANN {release} takes {'' if is_nz else '16, '}128 for latents")
    if is_nz and "BNSD" in layout:
        found.append(f"{kernel}: the cache is in FRACTAL_NZ with {layout!r}; CANN {release} does not take that")
    return found


def check(a: dict[str, Any]) -> None:
    """Raises ValueError with a sentence. Which form it is, is read off the tensors: latent attention has one for keys
    and values, expanded attention two, and both have ropes."""
    heads, kv_heads, layout = a["num_heads"], a["kv_heads"], a["input_layout"]
    given = [name for name in UNSUPPORTED if a["rest"].get(name) is not None]
    _require(not given, f"{given} are given; the interpreter knows no such inputs")
    _require(heads % kv_heads == 0, f"num_heads is {heads}, no multiple of num_key_value_heads {kv_heads}")
    _require(
        (a["query_rope"] is None) == (a["key_rope"] is None),
        "query_rope and key_rope are given together or not at all",
    )
    _require(layout in LAYOUTS, f"input_layout is {layout!r}; the interpreter knows {LAYOUTS}")
    _check_lengths(a, layout)
    if a["block_table"] is not None:
        _check_pages(a, layout)
    if a["query_rope"] is None:
        if a["block_table"] is not None:
            _check_paged_heads(a, layout)
    elif a["key"][0].data_ptr() == a["value"][0].data_ptr():
        _check_latent(a, layout)
    else:
        _check_expanded(a, layout)
    _check_mask(a, layout)
    if a["learnable_sink"] is not None:
        _check_sink(a, layout)


def _check_sink(a: dict[str, Any], layout: str) -> None:
    sink, width = a["learnable_sink"], a["value"][0].shape[-1]
    _require(layout == "TND", f"learnable_sink is given with input_layout {layout!r}; it takes TND")
    _require(width <= 128, f"learnable_sink is given with values of {width} columns; it takes up to 128")
    wanted = torch.bfloat16, (a["num_heads"],)
    found = sink.dtype, tuple(sink.shape)
    _require(found == wanted, f"learnable_sink is {found}; it is {wanted}")


def _check_latent(a: dict[str, Any], layout: str) -> None:
    heads, kv_heads = a["num_heads"], a["kv_heads"]
    _require(
        heads in (1, 2, 4, 8, 16, 32, 64, 128), f"num_heads is {heads}; of latent attention a power of 2 up to 128"
    )
    _require(kv_heads == 1, f"num_key_value_heads is {a['num_key_value_heads']}; of latent attention it is 1")
    _require(a["block_table"] is not None, "block_table is not given; latent attention reads pages alone")
    for length in _query_lengths(a, layout):
        _require(0 <= length <= 16, f"a sequence has {length} queries; latent attention takes up to 16")
    if layout == "TND":
        return
    steps = a["query"].shape[layout.index("S")]
    wanted = 0 if steps == 1 else 3
    _require(a["sparse_mode"] == wanted, f"sparse_mode is {a['sparse_mode']} for {steps} queries; it must be {wanted}")


def _check_expanded(a: dict[str, Any], layout: str) -> None:
    _require(layout == "TND", f"input_layout is {layout!r}; of expanded attention it is TND")
    _require(a["block_table"] is None, "block_table is given; expanded attention reads no pages")
    ratio = a["num_heads"] // a["kv_heads"]
    _require(ratio <= 64, f"num_heads is {ratio} times num_key_value_heads; of expanded attention at most 64 times")


def _check_lengths(a: dict[str, Any], layout: str) -> None:
    is_ragged, is_paged = layout == "TND", a["block_table"] is not None
    _require(is_ragged or is_paged, f"block_table is not given; {layout} reads pages alone")
    has_ends = a["actual_seq_lengths"] is not None
    _require(is_ragged == has_ends, "TND has actual_seq_lengths, and nothing else has it")
    _require(a["actual_seq_lengths_kv"] is not None, "TND and block_table need actual_seq_lengths_kv")
    if is_ragged:
        tokens = len(a["query"])
        ends = a["actual_seq_lengths"].tolist()
        is_sum = ends == sorted(ends) and ends[-1] == tokens
        _require(
            is_sum, f"actual_seq_lengths is {ends}; of {layout} they are sums of lengths, the last of them {tokens}"
        )
    if is_ragged and not is_paged:
        _check_ends_of_keys(a, layout, ends)


def _check_ends_of_keys(a: dict[str, Any], layout: str, queries: list[int]) -> None:
    """CheckInputShapeWhenLayoutIsTND, CheckActSeqWhenLayoutIsTND and the sparse mode RIGHT_DOWN of CANN's tiling."""
    ends = a["actual_seq_lengths_kv"].tolist()
    total = len(a["key"][0])
    _require(len(ends) == len(queries), f"there are {len(queries)} sequences of queries and {len(ends)} of keys")
    is_sum = ends == sorted(ends) and ends[-1] == total
    _require(is_sum, f"actual_seq_lengths_kv is {ends}; of {layout} they are sums of lengths, the last of them {total}")
    if a["sparse_mode"] != 3:
        return
    counts = [[end - start for start, end in pairwise([0, *sums])] for sums in (queries, ends)]
    for row, (count, keys) in enumerate(zip(*counts, strict=True)):
        _require(count <= keys, f"sequence {row} has {count} queries and {keys} keys; sparse_mode 3 takes no more")


def _check_pages(a: dict[str, Any], layout: str) -> None:
    key, size = a["key"][0], a["rest"]["block_size"]
    found = key.shape[1 if key.ndim == 3 else -2]
    _require(size == found, f"block_size is {size}, the cache {list(key.shape)} has blocks of {found}")
    _require(size % 16 == 0 and 0 < size <= 1024, f"block_size is {size}; it is a multiple of 16 up to 1024")
    _require(a["block_table"].dtype == torch.int32, f"block_table is {a['block_table'].dtype}; it is int32")
    _check_blocks(a)
    if key.ndim == 4:
        allowed = layout in ("BNSD", "TND")
        _require(allowed, f"the cache is [blocks, N, BS, D] with input_layout {layout!r}; only BNSD and TND take that")
    if key.ndim == 5:
        _require(layout != "BNSD", f"the cache is in FRACTAL_NZ, which input_layout {layout!r} does not take")
        d0 = 32 // key.element_size()
        _require(key.shape[-1] == d0, f"the FRACTAL_NZ cache is {list(key.shape)}; its last axis is {d0}")


def _check_paged_heads(a: dict[str, Any], layout: str) -> None:
    """Heads over pages, where there is no rope: one query of each sequence as in IFATiling (incre_flash_attention),
    several as in CheckPATypeAndShape and CheckD of PromptFlashAttentionTiling. Layouts without T only."""
    _require(layout != "TND", "input_layout is 'TND'; TND reads no pages here")
    heads, kv_heads, query = a["num_heads"], a["kv_heads"], a["query"]
    key, value = a["key"][0], a["value"][0]
    _require(key.shape == value.shape, f"key is {list(key.shape)} and value {list(value.shape)}; they are alike")
    _require(key.ndim == 3 or layout == "BNSD", f"key has {key.ndim} axes with {layout}; it has 3")
    dtypes = {query.dtype, key.dtype, value.dtype}
    is_half = {query.dtype} in ({torch.bfloat16}, {torch.float16})
    has_codes = key.dtype == value.dtype == torch.int8
    allowed = "they are all bfloat16, or all float16, or keys and values are int8"
    _require(is_half and (has_codes or len(dtypes) == 1), f"query, key and value are {dtypes}; {allowed}")
    _check_codes(a, has_codes)
    width = query.shape[-1]
    found = key.shape[-1] // kv_heads if key.ndim == 3 else key.shape[-1]
    _require(width == found, f"query has {width} columns a head, key {found}")
    _require(width % 16 == 0 and width <= 512, f"a head has {width} columns; it has a multiple of 16 up to 512")
    _require(heads <= 256 and heads <= 64 * kv_heads, f"{heads} heads share {kv_heads}; up to 256, and 64 for each")
    _require(kv_heads * width <= 65535, f"a row of a page has {kv_heads * width} columns; it has up to 65535")
    steps, size = _query_lengths(a, layout)[0], a["rest"]["block_size"]
    least = 32 if has_codes else 16 if steps == 1 else 128
    _require(steps == 1 or not has_codes, f"there are {steps} queries of int8 keys with a scale for each column, not 1")
    _require(
        size % least == 0 and size <= 512, f"block_size is {size} for {steps} queries; {least}, 2 * {least} to 512"
    )
    batch, lengths = len(a["block_table"]), len(a["actual_seq_lengths_kv"])
    _require(batch == len(query) == lengths, f"block_table has {batch} rows, there are {lengths} lengths")


def _check_codes(a: dict[str, Any], has_codes: bool) -> None:
    """CheckKVAntiQuantPerChannel, CheckAntiQuantParamKeyType and CheckKeyAndValueAntiquantScaleOffset of IFATiling."""
    rest, query, heads = a["rest"], a["query"], a["kv_heads"]
    width = query.shape[-1]
    given = {name: rest.get(name) for name in CHANNELS}
    if not has_codes:
        _require(all(x is None for x in given.values()), "keys are not int8, but scales or offsets are given")
        return
    both = [given[name] is not None for name in CHANNELS]
    _require(both[:2] == [True, True], "int8 keys and values have scales both")
    _require(both[2] == both[3], "offsets are given for both of keys and values, or for neither")
    modes = rest.get("key_antiquant_mode", 0), rest.get("value_antiquant_mode", 0)
    _require(modes == (0, 0), f"the antiquant modes are {modes}; with a scale for each column they are 0")
    allowed = (1, heads, 1, width), (1, 1, heads, width), (1, heads, width), (1, heads * width)
    for name, x in given.items():
        if x is not None:
            _require(x.dtype == query.dtype, f"{name} is {x.dtype}, query is {query.dtype}; they are alike")
            _require(tuple(x.shape) in allowed, f"{name} is {list(x.shape)}; it is one of {allowed}")
    _require(width % 32 == 0, f"a head of int8 keys has {width} columns; it has a multiple of 32")


def _check_blocks(a: dict[str, Any]) -> None:
    """A device checks none of them, and reads memory of others."""
    size, count = a["rest"]["block_size"], a["key"][0].shape[0]
    rows = zip(a["block_table"].tolist(), a["actual_seq_lengths_kv"].tolist(), strict=True)
    for row, (blocks, length) in enumerate(rows):
        needed = -(-length // size)
        _require(needed <= len(blocks), f"sequence {row} has {length} keys, and block_table {len(blocks)} blocks")
        strange = [block for block in blocks[:needed] if not 0 <= block < count]
        _require(not strange, f"block_table has {strange} for sequence {row}; blocks are 0 to {count - 1}")


def _check_mask(a: dict[str, Any], layout: str) -> None:
    mask, mode = a["atten_mask"], a["sparse_mode"]
    _require(mode in (0, 3), f"sparse_mode is {mode}; the interpreter knows 0 and 3")
    if mode == 0:
        _require(mask is None, "atten_mask is given with sparse_mode 0, which MLA attention does not take")
        return
    _require(mask is not None, "atten_mask is not given; sparse_mode 3 needs the 2048 x 2048 one")
    is_dtype = mask.dtype in (torch.bool, torch.int8, torch.uint8)
    _require(is_dtype, f"atten_mask is {mask.dtype}; it is bool, int8 or uint8")
    is_table = mask.shape == (2048, 2048) and torch.equal(mask.bool(), TABLE)
    _require(
        is_table, f"atten_mask is {list(mask.shape)}; with sparse_mode 3 it is 2048 x 2048, ones above the diagonal"
    )


def _query_lengths(a: dict[str, Any], layout: str) -> list[int]:
    if layout == "TND":
        ends: Tensor = a["actual_seq_lengths"]
        return ends.diff(prepend=ends.new_zeros(1)).tolist()
    return [a["query"].shape[layout.index("S")]]


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(f"FusedInferAttentionScore: {sentence}")
