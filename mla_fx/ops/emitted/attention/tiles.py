"""Attention in memory that does not grow with queries times keys: PyTorch's own if it computes the same, otherwise
tiles of query rows."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn.functional import pad, scaled_dot_product_attention

from mla_fx.ops.common.machine import is_on_cpu
from mla_fx.ops.common.math import accumulation_dtype, wide_product
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import Scoring
from .softmax import as_mask, probabilities, share

TILE = 2**24  # scores at a time
FEW = 128  # query tokens whose scores are stored at once
SHORT = 16  # keys; with fewer, PyTorch's kernel for CPUs gives zeros for a query of NaN
LOWEST = torch.finfo(torch.bfloat16).min  # next to so low a score, any other vanishes, also when added to it
TAME = 2.0**100  # a score below this vanishes next to LOWEST

Form = Callable[..., Tensor]


def at_once(condition: Any, one: Form, other: Form, given: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Call the first of two functions of the same tensors if `condition` holds, else the second. Both return a tensor
    of the given sizes."""
    return one(*given) if condition else other(*given)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    how: Scoring,
    is_causal: bool = False,
    choose: Form = at_once,
) -> Tensor:
    """Attention of [B, N, S, D], [B, N, T, D] and [B, N, T, Dv] -> [B, N, S, Dv]; masks as in `probabilities`.

    is_causal lets row s attend to keys t <= s, and excludes a mask. PyTorch's own attention adds a mask's numbers to
    the scores, and replaces scores with is_causal. With a mask it is used only if no score can be NaN, infinite or
    close to it, with what is added or without, which `choose` checks at each call."""
    if is_causal and not how.scale > 0:  # there a score is hidden before it is scaled
        mask, is_causal = _causal(query, key), False
    if not is_expressible(query, key.shape[2], mask, how):
        return _in_tiles(query, key, value, _causal(query, key) if is_causal else mask, how)
    if mask is None:
        return by_pytorch(query, key, value, None, how, is_causal)
    columns = value.shape[3]
    query, key, value = _of_one_width(query, key, value)

    def own(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return _own(query, key, value, _expressed(query, mask, how.fill), how.scale)

    def tiles(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return _in_tiles(query, key, value, mask, how)

    sizes = *query.shape[:3], value.shape[3]
    return choose(_is_tame(query, key, mask, how.scale), own, tiles, (query, key, value, mask), sizes)[..., :columns]


def by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Scoring, is_causal: bool = False
) -> Tensor:
    """`attend` by PyTorch's own attention, if that is expressible and no score exceeds TAME under a mask."""
    columns = value.shape[3]
    query, key, value = _of_one_width(query, key, value)
    return _own(query, key, value, _expressed(query, mask, how.fill), how.scale, is_causal)[..., :columns]


def _in_tiles(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Scoring) -> Tensor:
    """The body's computation, in one tile for a compiler, which would otherwise write out every tile."""
    rows = [(0, query.shape[2])] if is_fake(query) else row_tiles(query.transpose(1, 2), key.shape[2])
    parts = []
    for first, last in rows:
        scores = wide_product(query[:, :, first:last], key.mT)
        weights, _ = probabilities(scores, None, mask_of_rows(mask, first, last), how)
        parts.append(weights.to(value.dtype) @ value)
    return torch.cat(parts, 2)


def _is_tame(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Whether no score can be TAME or more, scaled or not, or infinite with the mask; False for NaN."""
    limit = tame_limit(query.dtype, query.shape[3], scale)
    return (query.abs() <= limit).all() & (key.abs() <= limit).all() & (mask < torch.inf).all()


def tame_limit(dtype: torch.dtype, columns: int, scale: float) -> float:
    """The largest number in queries and keys of so many columns for which no score can be TAME or more."""
    return min(math.sqrt(TAME / (columns * max(1.0, abs(scale)))), torch.finfo(dtype).max)


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """The keys that some row sees, [B, T, 1], where B and T may be 1; None without a mask.

    The others may be anything, for example left over from an earlier request, and should be zeroed."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    return (mask if mask.dtype == torch.bool else mask != -torch.inf).any(2).any(1).unsqueeze(-1)


def last_seen(mask: Tensor | None, context: int) -> int:
    """The number of keys up to the last one that some row sees: at least one if there are any, all without a mask."""
    seen = seen_keys(mask)
    if seen is None or seen.shape[1] == 1:
        return context
    places = seen.any(0).flatten().nonzero()
    return int(places[-1]) + 1 if len(places) else 1


def is_expressible(query: Tensor, context: int, mask: Tensor | None, how: Scoring) -> bool:
    """Whether PyTorch's own attention computes the same. `query` may be any tensor of its dtype and device."""
    if how != Scoring(how.scale, how.fill) or (isinstance(context, int) and context < SHORT):
        return False
    dtype = _mask_dtype(query)
    if how.fill is not None:
        return max(how.fill, torch.finfo(dtype).min) <= LOWEST
    return mask is None or mask.dtype == torch.bool or torch.promote_types(mask.dtype, dtype) == dtype


def goes_by_tiles(queries: Tensor, context: int) -> bool:
    """Whether the scores of queries [B, S, N, ...] take more than one tile; False for few scores."""
    steps = queries.shape[1]
    return not (isinstance(steps, int) and steps <= FEW) and not fit_a_tile(queries, context)


def rows_first(out: Tensor) -> Tensor:
    """[B, N, S, ...] as [B, S, N, ...], with the strides of a new tensor also where a size is one."""
    return out.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def count_of_scores(queries: Tensor, context: int) -> int | None:
    """The number of scores of queries [B, S, N, ...]; None if a size is a symbol."""
    sizes = *queries.shape[:3], context
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def fit_a_tile(queries: Tensor, context: int) -> bool:
    """Whether all scores of queries [B, S, N, ...] are few enough to be stored at once, whatever sizes are symbols."""
    return statically_known_true(math.prod((*queries.shape[:3], context)) <= TILE)


def row_tiles(queries: Tensor, context: int) -> Iterator[tuple[int, int]]:
    """Yield where each tile of the rows of queries [B, S, N, ...] begins and ends."""
    batch, steps, heads = queries.shape[:3]
    if not goes_by_tiles(queries, context):
        yield 0, steps
        return
    rows = max(1, TILE // (batch * heads * context))
    yield from parts(steps, rows)


def parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Where each part of at most `size` begins and ends."""
    return ((first, min(first + size, count)) for first in range(0, count, size))


def mask_of_rows(mask: Tensor | None, first: int, last: int) -> Tensor | None:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first:last, :]


def _of_one_width(query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """Padded on a CPU: for different widths its kernel is not used, and all scores are stored."""
    parts = query, key, value
    widest = max(part.shape[3] for part in parts)
    return (pad(part, (0, widest - part.shape[3])) if is_on_cpu(query) else part for part in parts)


def _own(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False
) -> Tensor:
    """The kernel divides by a row's sum at the end, so values are scaled down first if their dtype allows it."""
    most = 1.0 if value.dtype == torch.float16 else share(key.shape[2])
    given = query, key, value * most
    out = scaled_dot_product_attention(*given, attn_mask=mask, is_causal=is_causal, scale=scale) * (1 / most)
    if mask is not None and not is_on_cpu(query):  # not every kernel gives zeros for a row that sees nothing
        seen = mask if mask.dtype == torch.bool else mask != -torch.inf
        out = out.masked_fill(~seen.any(-1, keepdim=True), 0)
    return out


def _expressed(query: Tensor, mask: Tensor | None, fill: float | None) -> Tensor | None:
    """A mask in the form that PyTorch's own attention takes."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    dtype = _mask_dtype(query)
    if fill is not None:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, max(fill, torch.finfo(dtype).min))
    return mask if mask.dtype in (torch.bool, query.dtype) else mask.to(dtype)


def _mask_dtype(query: Tensor) -> torch.dtype:
    """The dtype in which a mask is added to scores."""
    return accumulation_dtype(query.dtype) if is_on_cpu(query) else query.dtype


def _causal(query: Tensor, key: Tensor) -> Tensor | None:
    return as_mask(None, None, True, query.transpose(1, 2), key.shape[2])
