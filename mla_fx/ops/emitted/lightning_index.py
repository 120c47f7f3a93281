"""lightning_index: the keys that the indexer of DeepSeek Sparse Attention chooses for each query."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mla_fx.ops.common.check import Sizes, check_letters, check_tensors
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true

from .attention.pages import check_block_table, context_of, gathered
from .attention.softmax import aligned, as_mask, check_mask, masked
from .attention.tiles import mask_of_rows, row_tiles


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    key: Tensor
    weights: Tensor
    mask: Tensor | None = None
    context_lens: Tensor | None = None
    block_table: Tensor | None = None
    key_scale: Tensor | None = None
    _: KW_ONLY
    sparse_count: int
    scale: float = 1.0
    fill: float | None = None


Compute = Callable[[Arguments], tuple[Tensor, Tensor]]
Store = Callable[[Arguments, Tensor], None]


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """The keys with the largest scores of an indexer, and their scores::

        score[b, s, t] = scale * sum over n of weights[b, s, n] * relu(query[b, s, n] . key[b, t]) * key_scale[b, t]
                         + mask[b, 0, s, t]

    query is [B, S, N, D], key [B, T, D] of the same dtype, bfloat16, float16, float32 or float64. weights, [B, S, N],
    may have any floating dtype, and so may key_scale, [B, T], one if it is None: keys that are codes have one. Scores
    are float32 (float64 for float64).

    mask broadcasts to [B, 1, S, T]: bool, where True may be chosen, or floating and added. context_lens, int64 [B] or
    [1], is the number of keys that the last row sees; each row before it sees one less. At most one of the two is
    given. Where a bool mask is False or context_lens hides a key, the score is `fill`, or minus infinity if that is
    None; it may be anything before that, even NaN. Anywhere else, NaN counts as the largest number.

    With a block_table, int64 or int32 [B, Blocks], key is pages [BlockNum, BlockSize, D], key_scale [BlockNum,
    BlockSize], and T is Blocks * BlockSize.

    Returns indices, int32 [B, S, 1, sparse_count], and values in the dtype of weights: the numbers of the keys with the
    largest scores, largest first, and these scores. With fewer than sparse_count keys in the context, the numbers that
    follow are -1, and their values minus infinity. Without `fill`, a hidden key comes last, and only where a row sees
    fewer keys than it may choose. Which of equal scores is chosen, and in which order, is not defined, as in
    torch.topk.

    The source is `torch_npu.npu_lightning_indexer`. Raises ValueError for arguments that do not fit. Inference only.
    """
    return chosen(scores(a), a)


def kernel(a: Arguments) -> tuple[Tensor, Tensor]:
    """Compute `body` by tiles of query rows, if there are many."""
    return in_parts(a, row_tiles(a.query, context_of(a.key, a.block_table)), body)


def in_parts(a: Arguments, rows: Iterable[tuple[int, int]], compute: Compute) -> tuple[Tensor, Tensor]:
    """What `compute` returns for some query rows at a time. Lengths become a mask."""
    mask = as_mask(a.mask, a.context_lens, False, a.query, context_of(a.key, a.block_table))
    whole, results = replace(a, context_lens=None), fake(a)
    for first, last in rows:
        query, weights = a.query[:, first:last], a.weights[:, first:last]
        found = compute(replace(whole, query=query, weights=weights, mask=mask_of_rows(mask, first, last)))
        if last - first >= a.query.shape[1]:
            return found
        for result, part in zip(results, found, strict=True):
            result[:, first:last] = part
    return results


def by_rows(a: Arguments, store: Store, at_once: int) -> tuple[Tensor, Tensor]:
    """Compute `body` for some query rows at a time: a kernel stores scores [B, S, T], at most `at_once` of them."""
    batch, steps = a.query.shape[:2]
    many = max(1, at_once // max(1, batch * context_of(a.key, a.block_table)))
    rows = ((first, first + many) for first in range(0, max(1, steps), many))
    return in_parts(a, rows, lambda part: chosen(_of_kernel(part, store), part))


def _of_kernel(a: Arguments, store: Store) -> Tensor:
    """[B, S, 1, T] from a kernel that knows no scales of keys."""
    is_finished, sizes = a.key_scale is None, (*a.query.shape[:2], context_of(a.key, a.block_table))
    out = a.query.new_empty(sizes, dtype=torch.float32)
    if out.numel() > 0:
        store(a if is_finished else replace(a, mask=None, fill=None, key_scale=None), out)
    return out.unsqueeze(2) if is_finished else _finished(out.unsqueeze(2), a)


def scores(a: Arguments) -> Tensor:
    """[B, S, 1, T]."""
    wide = accumulation_dtype(a.query.dtype)
    key = a.key if a.block_table is None else gathered(a.key, a.block_table)
    products = a.query.to(wide) @ key.to(wide).mT.unsqueeze(1)
    return _finished(a.weights.to(wide).unsqueeze(2) @ products.relu() * a.scale, a)


def _finished(weighed: Tensor, a: Arguments) -> Tensor:
    """Sums over heads [B, S, 1, T] times the scale of each key, under the mask."""
    if a.key_scale is not None:
        weighed = weighed * _scales(a.key_scale, a.block_table).to(weighed.dtype)[:, None, None]
    mask = as_mask(a.mask, a.context_lens, False, a.query, weighed.shape[-1])
    if mask is None:
        return weighed
    mask = aligned(mask, rows_first=True)
    return masked(weighed, mask, a.fill) if mask.dtype == torch.bool else weighed + mask


def _scales(scale: Tensor, table: Tensor | None) -> Tensor:
    """[B, T]."""
    return scale if table is None else gathered(scale.unsqueeze(-1), table).squeeze(-1)


def chosen(found: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    """The numbers and values of the largest scores [B, S, 1, T]."""
    count, context = a.sparse_count, found.shape[-1]
    if not statically_known_true(count <= context):
        count = torch.sym_min(count, context)  # type: ignore[no-untyped-call]  # torch has no types here
    values, indices = found.topk(count, -1)
    indices, values, missing = indices.to(torch.int32), values.to(a.weights.dtype), a.sparse_count - count
    if statically_known_true(missing == 0):
        return indices, values
    return pad(indices, (0, missing), value=-1), pad(values, (0, missing), value=-torch.inf)


def check(a: Arguments) -> None:
    check_tensors(vars(a), free=("weights", "key_scale"), skip=("mask", "context_lens", "block_table"))
    sizes: Sizes = {}
    check_letters(a, sizes, query="B, S, N, D", weights="B, S, N")
    rows = "B, T" if a.block_table is None else "BlockNum, BlockSize"
    check_letters(a, sizes, key=f"{rows}, D", key_scale=rows)
    if a.block_table is not None:
        check_block_table(a, sizes, "key")
    check_mask(a.mask, a.context_lens, False, a.fill, {**sizes, "N": 1})
    if statically_known_true(a.sparse_count < 1):
        raise ValueError(f"sparse_count is {a.sparse_count}; it must be 1 or more.")


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    shape = *a.query.shape[:2], 1, a.sparse_count
    return a.query.new_empty(shape, dtype=torch.int32), a.weights.new_empty(shape)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """One token and several, bool and additive masks, a fill, lengths, pages, fewer keys than may be chosen."""
    allowed = torch.arange(12) <= torch.arange(3).unsqueeze(-1) + 7
    options = {"sparse_count": 4, "scale": 0.3}
    yield Sample("no mask", sample(dtype, 0, 1), options)
    yield Sample("no mask, several tokens", sample(dtype, 1, 3), options)
    yield Sample("bool mask", (*sample(dtype, 2, 3), allowed), options)
    but_one = torch.arange(12) != torch.arange(3).unsqueeze(-1) + 7
    yield Sample("bool mask, fill", (*sample(dtype, 3, 3), but_one), {**options, "fill": -0.05, "sparse_count": 11})
    yield Sample("additive mask", (*sample(dtype, 4, 3), Sampler(dtype, 4).normal(2, 1, 3, 12)), options)
    lens = torch.tensor([12, 6])
    yield Sample("context_lens", (*sample(dtype, 5, 3), None, lens), options)
    yield Sample("fewer keys", sample(dtype, 6, 3), {"sparse_count": 16})
    table = torch.tensor([[3, 0, -1], [1, 2, 4]])
    query, _, weights = sample(dtype, 7, 3)
    pages = Sampler(dtype, 8).normal(5, 4, query.shape[-1])
    yield Sample("block_table", (query, pages, weights, None, lens, table), options)
    scales = Sampler(dtype, 9).normal(5, 4)  # of any sign
    yield Sample("block_table, key_scale", (query, pages, weights, None, lens, table, scales), options)
    scaled = {**options, "key_scale": Sampler(dtype, 9).normal(2, 12)}
    yield Sample("bool mask, fill, key_scale", (*sample(dtype, 3, 3), but_one), {**scaled, "fill": -0.05})


def sample(dtype: torch.dtype, seed: int, steps: int) -> tuple[Any, ...]:
    """Query, keys and weights of both signs. With so many heads, no two keys have no positive product, hence scores of
    zero."""
    batch, heads, context, width = 2, 16, 12, 8
    draw = Sampler(dtype, seed)
    return draw.normal(batch, steps, heads, width), draw.normal(batch, context, width), draw.normal(batch, steps, heads)


operator = define(
    "lightning_index",
    Arguments,
    body,
    returns=("indices", "values"),
    check=check,
    fake=fake,
    samples=samples,
    kernel=kernel,
)
