"""Seeded arguments for every scenario of paged_attention."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.define import Sample
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.sample import Sampler

from .arguments import ALIBI, KVHEAD, KVHEAD_ROPE, LOGN, MASK_FREE, NORM, NORM_COMPRESS, SPEC

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 32, 16

# Contexts of two tiles, of exactly two blocks, of one token, and none.
CONTEXTS = (150, 32, 1, 0)
STEPS = (3, 1, 2, 1)

Keywords = dict[str, Any]


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every scenario; full quantisation has 16-bit results only."""
    draw = Sampler(dtype, 7)
    yield sample("base", base(draw, qk_scale=0.5, q_scale=0.3))
    yield sample("base, a key head for each query head", base(draw, kv_heads=HEADS, value_size=48))
    yield sample("type_bnsd", base(draw, form="BNSD"))
    yield sample("NZ", base(draw, form="NZ"))
    yield from mask_samples(draw)
    yield from parallel_samples(draw)
    yield from nz_mask_samples(draw)
    yield from table_samples(draw)
    yield sample("type_dequant_fusion", dequantized(base(draw)))
    yield sample("type_dequant_fusion, offsets", dequantized(base(draw), offsets=True))
    if dtype in (torch.float16, torch.bfloat16):
        yield from quantized_samples(draw)
    status = torch.tensor([context > 0 for context in CONTEXTS], dtype=torch.int32)
    yield sample("batch_run_status", base(draw), batch_run_status=status, batch_run_status_enable=True)
    yield from compressed_samples(draw)
    yield sample("scale_type_logn", base(draw), scale_type=LOGN, log_n=log_n(draw))
    yield from combined_samples(draw)


def mask_samples(draw: Sampler) -> Iterator[Sample]:
    longest, batch = max(CONTEXTS), len(CONTEXTS)
    for mode, shape in (("shared", (1, longest + 3)), ("square", (longest, longest))):
        yield sample(f"mask_type_norm, {mode}", base(draw), mask_type=NORM, mask=draw.normal(*shape))
    yield sample("mask_type_norm, 3-D", base(draw), mask_type=NORM, mask=draw.normal(batch, 1, longest))
    for lead in ((HEADS,), (batch, HEADS), (batch, 1)):
        mode = f"mask_type_alibi, {len(lead) + 2}-D"
        yield sample(mode, base(draw), mask_type=ALIBI, mask=draw.normal(*lead, 1, longest))


def parallel_samples(draw: Sampler) -> Iterator[Sample]:
    """Several query rows per sequence."""
    longest = max(CONTEXTS)
    spec = base(draw, steps=STEPS)
    yield sample("calc_type_spec, mask_type_spec", spec, mask_type=SPEC, mask=draw.normal(6, longest + 2))
    square = base(draw, CONTEXTS[:2], steps=STEPS)
    yield sample("calc_type_spec, mask_type_norm", square, mask_type=NORM, mask=draw.normal(longest, longest))
    yield sample("calc_type_spec, NZ", base(draw, form="NZ", steps=STEPS))


def nz_mask_samples(draw: Sampler) -> Iterator[Sample]:
    """Masks in the format of NZ caches, with padding rows and columns."""
    bands, batch, tokens = math.ceil(max(CONTEXTS) / 16), len(CONTEXTS), 6
    for sequences in (batch, 1):
        mask = draw.normal(sequences, bands, 16, 16)
        yield sample("mask_type_norm, NZ", base(draw, form="NZ"), mask_type=NORM, mask=mask)
    for heads in (batch * HEADS, HEADS):
        mask = draw.normal(heads, bands, 16, 16)
        yield sample("mask_type_alibi, NZ", base(draw, form="NZ"), mask_type=ALIBI, mask=mask)
    for rows in (tokens, 16):
        spec = base(draw, form="NZ", steps=STEPS)
        yield sample("mask_type_spec, NZ", spec, mask_type=SPEC, mask=draw.normal(1, bands + 1, rows, 16))


def table_samples(draw: Sampler) -> Iterator[Sample]:
    """Masks of one table for all sequences; the end of the context selects the part."""
    free = base(draw, (130, 3, 257), steps=(2, 3, 129), form="NZ", block_size=128)
    yield sample("mask_type_mask_free", free, mask_type=MASK_FREE, mask=to_nz(causal(draw, 128)))
    table = causal(draw, 2048)
    decoding = base(draw, (150, 2100), form="NZ")
    yield sample("mask_type_norm_compress", decoding, mask_type=NORM_COMPRESS, mask=table)
    parallel = base(draw, (40, 2060), steps=(2, 4), form="NZ")
    yield sample("mask_type_norm_compress, NZ", parallel, mask_type=NORM_COMPRESS, mask=to_nz(table))


def quantized_samples(draw: Sampler) -> Iterator[Sample]:
    mask = draw.normal(1, max(CONTEXTS))
    offline = quantized(draw, base(draw), quant_type="type_quant_qkv_offline")
    yield sample("type_quant_qkv_offline", offline, mask=mask, mask_type=NORM)
    yield sample("type_quant_qkv_online", quantized(draw, base(draw), quant_type="type_quant_qkv_online"))
    for quant_type in ("type_quant_qkv_offline", "type_quant_qkv_online"):
        bits = as_bits(quantized(draw, base(draw), quant_type=quant_type))
        yield sample(f"{quant_type}, int64 scales", bits)
    combined = quantized(draw, base(draw, kv_heads=1, combined=24), quant_type="type_quant_qkv_online")
    yield sample("mla_v_head_size, type_quant_qkv_online", combined, mask=mask, mask_type=NORM)


def compressed_samples(draw: Sampler) -> Iterator[Sample]:
    """Each key head of a sequence has its own context, in pages with one head."""
    contexts = (150, 17, 32, 1, 0, 0)
    alibi = draw.normal(HEADS, 1, 150)
    yield sample("compress_type_kvhead", base(draw, contexts, compressed=True), mask=alibi, mask_type=ALIBI)
    norm = dequantized(base(draw, contexts, compressed=True), offsets=True)
    yield sample("compress_type_kvhead, dequant", norm, mask=draw.normal(3, 1, 150), mask_type=NORM)
    razor = base(draw, contexts, compressed=True)
    offset = 3 * Sampler(torch.float32, 5).normal(*razor["key_cache"].shape[:2])
    yield sample("compress_type_kvhead_rope", razor, compress_type=KVHEAD_ROPE, razor_offset=offset)


def combined_samples(draw: Sampler) -> Iterator[Sample]:
    combined = base(draw, kv_heads=1, combined=24)
    yield sample("mla_v_head_size", combined, mask_type=NORM, mask=draw.normal(1, max(CONTEXTS)))
    mask = draw.normal(6, max(CONTEXTS))
    mask = (mask > 0).to(mask.dtype) if draw.dtype == torch.bfloat16 else mask
    spec = base(draw, kv_heads=1, combined=24, steps=STEPS)
    yield sample("mla_v_head_size, calc_type_spec", spec, mask_type=SPEC, mask=mask)


def sample(mode: str, arguments: Keywords, **more: Any) -> Sample:
    arguments = arguments | more
    names = ("query", "key_cache", "value_cache", "block_tables", "context_lens")
    return Sample(mode, tuple(arguments.pop(name, None) for name in names), arguments)


def base(
    draw: Sampler,
    contexts: Sequence[int] = CONTEXTS,
    *,
    kv_heads: int = KV_HEADS,
    value_size: int = HEAD_SIZE,
    block_size: int = BLOCK_SIZE,
    form: str = "BSND",
    steps: Sequence[int] | None = None,
    combined: int = 0,
    compressed: bool = False,
    **options: Any,
) -> Keywords:
    """The arguments of every scenario; `steps` makes it parallel decoding, `combined` is the width of values in the
    keys."""
    pages = [math.ceil(context / block_size) for context in contexts]
    blocks = sum(pages) + 2  # two that are not used
    tables = draw.block_tables(pages, blocks)
    live = [context > 0 for context in contexts[:: kv_heads if compressed else 1]]
    tokens = sum(step for step, runs in zip(steps or [1] * len(live), live, strict=False) if runs)
    cache_heads = 1 if compressed else kv_heads
    arguments = {
        "query": draw.normal(tokens, HEADS, HEAD_SIZE),
        "key_cache": cache(draw, form, blocks, block_size, cache_heads, HEAD_SIZE),
        "block_tables": tables,
        "context_lens": torch.tensor(contexts, dtype=torch.int32),
        "kv_head_num": kv_heads,
        "qk_scale": 1 / math.sqrt(HEAD_SIZE),
    }
    if not combined:
        arguments["value_cache"] = cache(draw, form, blocks, block_size, cache_heads, value_size)
    if steps is not None:
        options |= {
            "calc_type": "calc_type_spec",
            "q_seq_lens": torch.tensor(steps[: len(contexts)], dtype=torch.int32),
        }
    if combined:
        options |= {"mla_v_head_size": combined}
    if compressed:
        options |= {"compress_type": KVHEAD}
    if form == "BNSD":
        options |= {"input_layout": "type_bnsd"}
    return arguments | options


def cache(draw: Sampler, form: str, blocks: int, block_size: int, heads: int, size: int) -> Tensor:
    shapes = {
        "BSND": (blocks, block_size, heads, size),
        "BNSD": (blocks, heads, block_size, size),
        "NZ": (blocks, heads * size // 16, block_size, 16),
    }
    return draw.normal(*shapes[form])


def causal(draw: Sampler, size: int) -> Tensor:
    """A table that hides what is above the diagonal, and adds weights elsewhere."""
    above = torch.ones(size, size, dtype=torch.bool).triu(1)
    return draw.normal(size, size).masked_fill(above, -10000.0)


def to_nz(matrix: Tensor) -> Tensor:
    return torch.unflatten(matrix, 1, (-1, 16)).transpose(0, 1).unsqueeze(0).contiguous()


def log_n(draw: Sampler) -> Tensor:
    return Sampler(accumulation_dtype(draw.dtype), 3).gamma(len(CONTEXTS))


def dequantized(arguments: Keywords, offsets: bool = False) -> Keywords:
    """The same with int8 caches, with offsets, and with int64 scales that hold the bits of a float32."""
    columns = arguments["kv_head_num"] * HEAD_SIZE
    changed: Keywords = {"quant_type": "type_dequant_fusion", "has_quant_offset": offsets}
    for side in ("key", "value"):
        changed[f"{side}_cache"] = i8_trunc(30 * arguments[f"{side}_cache"].float())
        changed[f"{side[0]}_descale"] = Sampler(torch.float32, len(side)).gamma(columns) / 30
        if offsets:
            changed[f"{side[0]}_offset"] = torch.arange(columns, dtype=torch.int32) % 7 - 3
    return arguments | (as_bits(changed) if offsets else changed)


def as_bits(arguments: Keywords) -> Keywords:
    """The same with int64 scales, whose low half holds a float32 and whose high half is full."""
    names = ("k_descale", "v_descale")
    return arguments | {name: arguments[name].view(torch.int32).long() - 2**32 for name in names}


def quantized(draw: Sampler, arguments: Keywords, quant_type: str) -> Keywords:
    """The same with int8 query and caches, and scales per query head."""
    scales = Sampler(torch.float32, 9)
    names = [name for name in ("query", "key_cache", "value_cache") if name in arguments]
    changed: Keywords = {name: i8_trunc(30 * arguments[name].float()) for name in names}
    changed |= {"k_descale": scales.gamma(HEADS) / 900, "v_descale": scales.gamma(HEADS) / 30}
    if quant_type.endswith("offline"):
        changed["p_scale"] = 127 / 1.3 * scales.gamma(HEADS)
        changed["v_descale"] = changed["v_descale"] / changed["p_scale"]
    return arguments | changed | {"quant_type": quant_type, "out_data_type": draw.dtype}
