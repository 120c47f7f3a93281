"""Attention to chosen keys: indices name the rows of a context that each query reads.

Each query is then a sequence of its own, whose pages are single rows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.check import INTEGERS, Sizes, check_dtype, check_letters, readable
from mla_fx.ops.common.define import Given

from .codes import of_rows
from .pages import context_of, whole_mask
from .parts import each_token
from .softmax import aligned, last_keys, masked


def over_rows(a: Any) -> Any:
    """A call with indices and without weights as one without indices: B * S sequences of one token, each with its
    rows."""
    batch, steps = a.query.shape[:2]
    keys, context = a.indices.squeeze(2), context_of(a.kv_cache, a.block_table)
    keys = keys.clamp(min=0).to(torch.int64)
    is_key = mask = seen_places(a)
    if a.mask is not None:
        given = aligned(a.mask, rows_first=True)
        given = given.expand(batch, steps, given.shape[2], context)
        given = given.gather(-1, keys.unsqueeze(2).expand(-1, -1, given.shape[2], -1))
        mask = is_key & given if given.dtype == torch.bool else masked(given, is_key, None)
    return replace(
        a,
        **each_token(a),
        kv_cache=_rows(a.kv_cache),
        kr_cache=None if a.kr_cache is None else _rows(a.kr_cache),
        mask=mask.flatten(0, 1).unsqueeze(2),
        context_lens=None,
        block_table=_places(a, keys, context).flatten(0, 1),
        kv_scales=_scales(a.kv_scales, a.kv_cache),
        kr_scales=_scales(a.kr_scales, a.kr_cache),
        indices=None,
    )


def over_all(a: Any) -> Any:
    """A call with indices as attention to all keys under a mask."""
    batch, steps, _, _ = a.indices.shape
    context = context_of(a.kv_cache, a.block_table)
    mask = a.indices.new_zeros(batch, steps, context + 1, dtype=torch.bool)  # the last place is of no key
    keys = a.indices.squeeze(2).to(torch.int64)
    mask = mask.scatter_(-1, keys.masked_fill(keys < 0, context), True)[..., :context].unsqueeze(1)
    given = whole_mask(a)
    if given is not None:
        given = aligned(given, rows_first=False)
        mask = mask & given if given.dtype == torch.bool else masked(given, mask, None)
    return replace(a, mask=mask, context_lens=None, indices=None)


def seen_places(a: Any) -> Tensor:
    """Whether a place of `indices` holds a key that the lengths do not hide, [B, S, 1, K]."""
    is_key: Tensor = a.indices >= 0
    if a.context_lens is not None:
        is_key = is_key & (a.indices <= last_keys(a.context_lens, a.query).mT.unsqueeze(-1))
    return is_key


def _rows(cache: Tensor) -> Tensor:
    """[B, T, width] or [BlockNum, BlockSize, width] -> [rows, 1, width]."""
    return cache.flatten(0, 1).unsqueeze(1)


def _scales(scales: Tensor | None, cache: Tensor | None) -> Tensor | None:
    """The scales of rows, or those of all rows."""
    if scales is None or cache is None or scales.shape[0] == scales.shape[1] == 1:
        return scales
    rows: Tensor | None = of_rows(scales, cache)
    return None if rows is None else _rows(rows)


def _places(a: Any, keys: Tensor, context: int) -> Tensor:
    """The rows of all contexts, or of all pages, that hold the keys [B, S, K]."""
    if a.block_table is None:
        first = context * torch.arange(keys.shape[0], device=keys.device).view(-1, 1, 1)
        return torch.where(keys < context, keys + first, keys.shape[0] * context)  # or a row that is not there
    blocks, size = a.kv_cache.shape[:2]
    page: Tensor = a.block_table.to(torch.int64).gather(1, (keys // size).flatten(1)).view(keys.shape)
    rows: Tensor = page.remainder(blocks) * size + keys % size
    return rows


def check_indices(a: Any, sizes: Sizes) -> None:
    """Check that indices name keys, that places without a key come last, and that nothing excludes indices."""
    if a.indices is None:
        return
    if a.kv_cache.dim() == 4:
        shown = f"kv_cache has shape {list(a.kv_cache.shape)}; it must be [B, T, Hckv] or [BlockNum, BlockSize, Hckv]"
        raise ValueError(f"{shown}: chosen rows are not read out of FRACTAL_NZ.")
    for name, given, needed in (("fill", a.fill, None), ("is_causal", a.is_causal, False)):
        if given is not needed:
            raise ValueError(f"{name} is {given} and indices are given; it must be {needed}.")
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


def chosen(args: tuple[Any, ...], options: dict[str, Any], context: int = 5, count: int = 4) -> Given:
    """Let each query of a call choose `count` keys. The last place has no key, and one row has none at all."""
    batch, steps = args[0].shape[:2]
    draw = torch.Generator().manual_seed(steps)
    indices = torch.rand(batch, steps, 1, context, generator=draw).argsort(-1)[..., :count]
    indices[..., count - 1] = -1
    indices[0, steps // 2] = -1
    return args, options | {"indices": indices}
