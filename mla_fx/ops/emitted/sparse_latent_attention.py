"""sparse_latent_attention: attention of absorbed queries over the latents of chosen keys."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import INTEGERS, Sizes, check_dtype, check_letters, readable
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.sample import Sampler

from . import latent_attention
from .attention import aligned, check_mask, last_keys, masked
from .codes import of_rows
from .pages import check_operands, context_of

PAYS = 4  # times as many keys as are chosen: with fewer, attention to all of them costs less; measured on a CPU


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    query_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    indices: Tensor
    mask: Tensor | None = None
    context_lens: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    kv_scales: Tensor | None = None
    kr_scales: Tensor | None = None
    _: KW_ONLY
    scale: float


def body(a: Arguments) -> Tensor:
    """The attention of `latent_attention`, in which each query sees no keys but those it chose::

        t   = indices[b, s, 0]
        out = softmax((query . kv_cache[t] + query_rope . kr_cache[t]) * scale + mask[t]) . kv_cache[t]

    query, query_rope, kv_cache, kr_cache, scale, mask, context_lens, sinks, block_table, kv_scales and kr_scales are
    those of `latent_attention`, and mean the same; masks have no `fill`. indices, int64 or int32 [B, S, 1, K], are
    numbers of tokens in the context of the sequence, below T, in any order. Negative numbers are no keys, and come
    last. A key that is named twice counts twice. All heads see the same keys, as far as the mask allows.

    A row without visible keys gives zeros. No more than K rows of a context are read for a query. Caches with a gap
    between sequences are copied, so give the whole of one, with lengths, and not a slice.

    Returns [B, S, N, Hckv]. Raises ValueError for arguments that do not fit. Inference only.
    """
    return latent_attention.body(over_rows(a)).view(a.query.shape)


def over_rows(a: Arguments) -> latent_attention.Arguments:
    """The same as latent_attention of B * S sequences with one token each, whose pages are single rows."""
    batch, steps = a.query.shape[:2]
    keys, context = a.indices.squeeze(2), context_of(a.kv_cache, a.block_table)
    keys = keys.clamp(min=0).to(torch.int64)
    is_key = mask = seen_places(a)
    if a.mask is not None:
        given = aligned(a.mask, rows_first=True)
        given = given.expand(batch, steps, given.shape[2], context)
        given = given.gather(-1, keys.unsqueeze(2).expand(-1, -1, given.shape[2], -1))
        mask = is_key & given if given.dtype == torch.bool else masked(given, is_key, None)
    return latent_attention.Arguments(
        a.query.flatten(0, 1).unsqueeze(1),
        None if a.query_rope is None else a.query_rope.flatten(0, 1).unsqueeze(1),
        _rows(a.kv_cache),
        None if a.kr_cache is None else _rows(a.kr_cache),
        mask.flatten(0, 1).unsqueeze(2),
        None,
        a.sinks,
        _places(a, keys, context).flatten(0, 1),
        _scales(a.kv_scales, a.kv_cache),
        _scales(a.kr_scales, a.kr_cache),
        scale=a.scale,
    )


def seen_places(a: Arguments) -> Tensor:
    """Whether a place of `indices` holds a key that the lengths do not hide, [B, S, 1, K]."""
    is_key = a.indices >= 0
    if a.context_lens is None:
        return is_key
    return is_key & (a.indices <= last_keys(a.context_lens, a.query).mT.unsqueeze(-1))


def _rows(cache: Tensor) -> Tensor:
    """[B, T, width] or [BlockNum, BlockSize, width] -> [rows, 1, width]."""
    return cache.flatten(0, 1).unsqueeze(1)


def _scales(scales: Tensor | None, cache: Tensor | None) -> Tensor | None:
    """The scales of rows, or those of all rows."""
    if scales is None or cache is None or scales.shape[0] == scales.shape[1] == 1:
        return scales
    rows: Tensor | None = of_rows(scales, cache)
    return None if rows is None else _rows(rows)


def _places(a: Arguments, keys: Tensor, context: int) -> Tensor:
    """The rows of all contexts, or of all pages, that hold the keys [B, S, K]."""
    if a.block_table is None:
        first = context * torch.arange(keys.shape[0], device=keys.device).view(-1, 1, 1)
        return torch.where(keys < context, keys + first, keys.shape[0] * context)  # or a row that is not there
    blocks, size = a.kv_cache.shape[:2]
    page = a.block_table.to(torch.int64).gather(1, (keys // size).flatten(1)).view(keys.shape)
    return page.remainder(blocks) * size + keys % size


def check(a: Arguments) -> None:
    refuse_fractals(a.kv_cache)
    sizes = check_operands(a, "B, S, N, Hckv", "indices")
    check_indices(a, sizes)
    check_mask(a.mask, a.context_lens, False, None, sizes)
    check_letters(a, sizes, sinks="N")


def refuse_fractals(cache: Tensor) -> None:
    if cache.dim() == 4:
        shown = f"kv_cache has shape {list(cache.shape)}; it must be [B, T, Hckv] or [BlockNum, BlockSize, Hckv]"
        raise ValueError(f"{shown}: chosen rows are not read out of FRACTAL_NZ.")


def check_indices(a: Any, sizes: Sizes) -> None:
    """Check that indices name keys, and that places without a key come last."""
    check_letters(a, sizes, indices="B, S, 1, K")
    check_dtype("indices", a.indices, INTEGERS)
    check_numbers(a.indices, sizes["T"])
    if not readable(a.indices):
        return
    is_key = a.indices >= 0
    if bool((is_key[..., 1:] & ~is_key[..., :-1]).any()):
        raise ValueError("indices hold a key behind a negative number; negative numbers, which are no keys, come last.")


def check_numbers(indices: Tensor, context: int) -> None:
    """Check that indices are of the own sequence. Behind it lies another one, which a kernel would read."""
    if readable(indices) and indices.numel() > 0 and (largest := int(indices.max())) >= context:
        raise ValueError(f"indices hold {largest}; they must be below {context}, the length of the contexts.")


def fake(a: Arguments) -> Tensor:
    return a.query.new_empty(a.query.shape)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Keys in any order, fewer than there are places, and none for a row; bool and additive masks, of all heads and of
    each, lengths, no rotary part, sinks, pages, one token."""
    options = {"scale": 0.3}
    allowed = torch.arange(5) <= torch.arange(3).unsqueeze(-1) + 2
    yield Sample("indices", chosen(latent_attention.sample(dtype, 0, 3)), options)
    yield Sample("indices, one token", chosen(latent_attention.sample(dtype, 1, 1)), options)
    yield Sample("bool mask", chosen(latent_attention.sample(dtype, 2, 3, allowed)), options)
    bias = Sampler(dtype, 3).normal(2, 3, 3, 5)
    yield Sample("additive mask", chosen(latent_attention.sample(dtype, 3, 3, bias)), options)
    lens = torch.tensor([5, 3])
    yield Sample("context_lens", (*chosen(latent_attention.sample(dtype, 4, 3)), lens), options)
    bare = latent_attention.without_rope(latent_attention.sample(dtype, 5, 3))
    yield Sample("no rotary part", chosen(bare), options)
    sinks = Sampler(dtype, 6).normal(3)
    yield Sample("sinks", (*chosen(latent_attention.sample(dtype, 6, 3)), None, sinks), options)
    coded, scaled = latent_attention.in_codes(latent_attention.sample(dtype, 8, 3), options, (2, 1, 4))
    yield Sample("codes", chosen(coded), scaled)
    args, options = latent_attention.paged_sample(dtype, 7, 3)
    yield Sample("block_table", (*chosen(args[:5], 640, 40), torch.tensor([600, 70]), None, args[-1]), options)


def chosen(args: tuple[Any, ...], context: int = 5, count: int = 4) -> tuple[Any, ...]:
    """The arguments of latent_attention with `count` keys for each query. The last is none, as are all of one row."""
    query, query_rope, kv_cache, kr_cache, mask = args
    batch, steps = query.shape[:2]
    draw = torch.Generator().manual_seed(steps)
    indices = torch.rand(batch, steps, 1, context, generator=draw).argsort(-1)[..., :count]
    indices[..., count - 1] = -1
    indices[0, steps // 2] = -1
    return query, query_rope, kv_cache, kr_cache, indices, mask


operator = define("sparse_latent_attention", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)
