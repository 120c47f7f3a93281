"""latent_attention: attention of absorbed queries over the compressed latents themselves, or over chosen ones."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.math import accumulation_dtype, wide_product
from mla_fx.ops.common.sample import Sampler

from .attention import as_mask, check_mask, check_sinks, fake_sums, probabilities
from .chosen_rows import check_indices, chosen, over_rows
from .codes import CODES, dequantised, dtype_of
from .pages import check_operands, context_of, latent_tiles
from .tiled_attention import goes_by_tiles, mask_of_rows, row_tiles


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    query_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    mask: Tensor | None
    context_lens: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    kv_scales: Tensor | None = None
    kr_scales: Tensor | None = None
    indices: Tensor | None = None
    _: KW_ONLY
    scale: float
    is_causal: bool = False
    fill: float | None = None
    return_lse: bool = False


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """Attention in which all heads share one latent key, which is also the value::

        s   = (query . kv_cache + query_rope . kr_cache) * scale + mask
        out = softmax(s) . kv_cache
        lse = log(sum(exp(s)))

    query is [B, S, N, Hckv], query_rope [B, S, N, Dr], kv_cache [B, T, Hckv], kr_cache [B, T, Dr], all of one dtype:
    bfloat16, float16, float32 or float64. query_rope and kr_cache are None if there is no rotary part.

    mask broadcasts to [B, N, S, T]: bool, where True may attend, or floating and added. context_lens, int64 [B] or [1],
    is the number of keys that the last row sees; each row before it sees one less: row s attends to keys
    t < context_lens[b] - S + 1 + s. It may be any number; past the ends of the cache there is nothing to hide or to
    see.
    is_causal lets row s attend to keys t <= s. At most one of the three is given. Where a bool mask is False or
    context_lens hides a key, the score is `fill`, or minus infinity if that is None. A row whose scores are all minus
    infinity gives zeros. So a row without visible keys gives zeros or, with `fill`, the mean of all T values. A hidden
    score may be anything, even NaN, also where minus infinity is added to it.

    sinks, [N] in any floating dtype, adds one score to each row of a head, neither scaled nor masked. Its probability
    is dropped, so the keys' probabilities sum to less than one. The softmax runs in float32 (float64 for float64);
    probabilities are rounded to the dtype of query. No score leaves the range of float16: with float16, products are
    float32. For float16 caches, a query that was absorbed may be float32.

    With a block_table, int64 or int32 [B, Blocks], the caches are pages [BlockNum, BlockSize, Hckv] and [BlockNum,
    BlockSize, Dr], or both in FRACTAL_NZ, [BlockNum, Hckv/n0, BlockSize, n0] and [BlockNum, Dr/n0, BlockSize, n0],
    where only axis 0 may have gaps; n0 elements take 32 bytes in kernels. The context of a sequence is the
    concatenation of the blocks in its row: T is Blocks * BlockSize. A negative number counts blocks from the end. A
    whole context is never copied.

    Caches may hold codes, int8 or float8 (e4m3fn, e5m2), which are numbers when they are multiplied by scales in
    float32 and rounded to the dtype of query. kv_scales, floating, broadcasts to [B, T, C], or to [BlockNum, BlockSize,
    C] with a block_table: each scale is of Hckv / C adjacent columns, so C is 1 for a scale of each token, and Hckv for
    one of each column. kr_scales are the same for kr_cache; without them, kr_cache has the dtype of query. There are
    no codes in FRACTAL_NZ. Beside scales in float64, codes may be float64, in which a rewrite is checked.

    With indices, int64 or int32 [B, S, 1, K], a query sees no keys but those it chose::

        t   = indices[b, s, 0]
        out = softmax((query . kv_cache[t] + query_rope . kr_cache[t]) * scale + mask[t]) . kv_cache[t]

    They are numbers of tokens in the context of the sequence, below T, in any order. Negative numbers are no keys, and
    come last. A key that is named twice counts twice. All heads see the same keys, as far as mask or context_lens
    allow; there is no is_causal, no `fill`, and no FRACTAL_NZ. No more than K rows of a context are read for a query.
    Caches with a gap between sequences are copied, so give the whole of one, with lengths, and not a slice.

    Attention over parts of a context, each with its lse, is merged to attention over the whole::

        lse = logsumexp(lses);  out = sum(exp(lses - lse) * outs)

    Returns out, [B, S, N, Hckv], and lse: with return_lse, [B, S, N] in float32, or float64 for float64, natural
    logarithms, and minus infinity for a row whose scores all are, so that it adds nothing to others; else an empty
    tensor. There are no sinks with return_lse. Raises ValueError for arguments that do not fit. Inference only.
    """
    if a.indices is not None:
        return of_queries(body(over_rows(a)), a)
    a = in_numbers(a)
    weights, lse = probabilities(*scores(a), a.scale, a.fill, a.sinks, rows_first=True, return_lse=a.return_lse)
    return weighted(weights.to(dtype_of(a)), a), lse


def of_queries(results: tuple[Tensor, Tensor], a: Arguments) -> tuple[Tensor, Tensor]:
    """What was computed for each query token as a sequence, for the sequences that these are of."""
    out, lse = results
    return out.view(a.query.shape), lse.view(a.query.shape[:3]) if a.return_lse else lse


def in_numbers(a: Arguments) -> Arguments:
    """The same call without codes, unless they are in pages, which are read tile by tile."""
    numbers: Arguments = dequantised(a) if a.block_table is None else a
    return numbers


def kernel(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same by tiles of query rows, if there are many."""
    context = context_of(a.kv_cache, a.block_table)
    if a.indices is not None or not goes_by_tiles(a.query, context):
        return body(a)
    a = in_numbers(a)
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.query, context)
    return concatenated(body(_of_rows(a, mask, *rows)) for rows in row_tiles(a.query, context))


def concatenated(results: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of tokens that follow one another in a row."""
    out, lse = (torch.cat(parts, 1 if parts[0].dim() > 1 else 0) for parts in zip(*results, strict=True))
    return out, lse


def _of_rows(a: Arguments, mask: Tensor | None, first: int, last: int) -> Arguments:
    query_rope = None if a.query_rope is None else a.query_rope[:, first:last]
    part = replace(a, query=a.query[:, first:last], query_rope=query_rope, context_lens=None, is_causal=False)
    return replace(part, mask=mask_of_rows(mask, first, last))


def scores(a: Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The latent and rotary part of the scores, [B, S, N, T], and the mask."""
    rotated = None
    if a.query_rope is not None and a.kr_cache is not None:
        rotated = _products(a.query_rope, a.kr_cache, a.block_table, a.kr_scales)
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.query, context_of(a.kv_cache, a.block_table))
    return _products(a.query, a.kv_cache, a.block_table, a.kv_scales), rotated, mask


def _products(query: Tensor, cache: Tensor, block_table: Tensor | None, scales: Tensor | None) -> Tensor:
    """[B, S, N, width], and the keys -> [B, S, N, T]."""
    rows = query.flatten(1, 2)
    if block_table is None:
        return wide_product(rows, cache.mT).view(*query.shape[:3], cache.shape[1])
    parts = [wide_product(rows, keys.mT) for keys, _, _ in latent_tiles(cache, block_table, scales, query.dtype)]
    scores = torch.cat(parts, -1) if parts else rows.new_empty(*rows.shape[:2], 0)
    return scores.view(*query.shape[:3], scores.shape[-1])


def weighted(weights: Tensor, a: Arguments) -> Tensor:
    """[B, S, N, T], and the values -> [B, S, N, Hckv]."""
    rows = weights.flatten(1, 2)
    if a.block_table is None:
        return torch.bmm(rows, a.kv_cache).view(a.query.shape)
    out = rows.new_zeros(*rows.shape[:2], a.query.shape[3], dtype=accumulation_dtype(weights.dtype))
    for values, first, last in latent_tiles(a.kv_cache, a.block_table, a.kv_scales, weights.dtype):
        out += torch.bmm(rows[..., first:last], values)
    return out.to(weights.dtype).view(a.query.shape)


def check(a: Arguments) -> None:
    sizes = check_operands(a, "B, S, N, Hckv", "indices")
    check_mask(a.mask, a.context_lens, a.is_causal, a.fill, sizes)
    check_sinks(a, sizes)
    check_indices(a, sizes)


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return a.query.new_empty(a.query.shape), fake_sums(a.query, a.return_lse)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every call of attention alone and, without sinks, with logarithms."""
    yield from with_sums(attention_samples(dtype))


def with_sums(calls: Iterable[Sample]) -> Iterator[Sample]:
    """The same calls and, without sinks, the same with logarithms."""
    for one in calls:
        yield one
        if "sinks" not in one.mode:
            yield Sample(f"{one.mode}, return_lse", one.args, {**one.kwargs, "return_lse": True})


def attention_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """No mask, causal, bool and additive masks, lengths, one query token, a row that sees nothing or is filled; the
    same without a rotary part, and with sinks."""
    bias = Sampler(dtype, 9).normal(2, 1, 3, 5)
    allowed = torch.arange(5) <= torch.arange(3).unsqueeze(-1) + 2
    blind = allowed.clone()
    blind[1] = False
    yield Sample("no mask", sample(dtype, 0, 3), {"scale": 0.3})
    yield Sample("causal", sample(dtype, 1, 3), {"scale": 0.3, "is_causal": True})
    yield Sample("bool mask", sample(dtype, 2, 3, allowed), {"scale": 0.25})
    yield Sample("additive mask", sample(dtype, 3, 3, bias), {"scale": 0.5})
    yield Sample("no mask", sample(dtype, 4, 1), {"scale": 0.3})
    yield Sample("bool mask", sample(dtype, 5, 3, blind), {"scale": 0.3})
    yield Sample("bool mask, fill", sample(dtype, 6, 3, blind), {"scale": 0.3, "fill": -1.5})
    lens, short = torch.tensor([5, 3]), torch.tensor([2])
    yield Sample("context_lens", (*sample(dtype, 7, 3), lens), {"scale": 0.3})
    yield Sample("context_lens", (*sample(dtype, 8, 1), lens), {"scale": 0.3})
    yield Sample("context_lens, one for all", (*sample(dtype, 9, 3), short), {"scale": 0.3})
    yield Sample("context_lens, fill", (*sample(dtype, 10, 3), short), {"scale": 0.3, "fill": -1.5})
    yield Sample("no rotary part", without_rope(sample(dtype, 11, 3)), {"scale": 0.3, "is_causal": True})
    sinks = Sampler(dtype, 12).normal(3)
    yield Sample("sinks", (*sample(dtype, 12, 3), None, sinks), {"scale": 0.3})
    yield Sample("sinks, context_lens", (*sample(dtype, 13, 1), lens, sinks), {"scale": 0.3})
    yield Sample("sinks, bool mask", (*sample(dtype, 14, 3, blind), None, sinks.float()), {"scale": 0.3})
    filled = {"scale": 0.3, "fill": -1.5}
    yield Sample("sinks, bool mask, fill", (*without_rope(sample(dtype, 15, 3, blind)), None, sinks), filled)
    yield Sample("block_table, context_lens", *paged_sample(dtype, 16, 3, torch.tensor([70, 3])))
    yield Sample("block_table, no mask", *paged_sample(dtype, 17, 1))
    yield Sample("block_table, context_lens, NZ", *in_fractals(*paged_sample(dtype, 18, 3, torch.tensor([70, 3]), 16)))
    columns = in_codes(sample(dtype, 19, 3), {"scale": 0.3}, (1, 1, 16), torch.int8)
    yield Sample("codes, a scale for each column", *columns)
    paged = paged_sample(dtype, 20, 3, torch.tensor([70, 3]))
    yield Sample("codes, block_table, scales of tiles", *in_codes(*paged, (20, 64, 4)))
    bare = without_rope(sample(dtype, 21, 1)), {"scale": 0.3}
    yield Sample("codes, no rotary part, one scale for each token", *in_codes(*bare, (2, 5, 1), CODES[2]))
    both = in_codes(*paged_sample(dtype, 22, 1), (20, 64, 2), rotary=(1, 1, 1))
    yield Sample("codes, block_table, rotary codes", *both)
    yield from chosen_samples(dtype)


def chosen_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Keys in any order, fewer than there are places, and none for a row; bool and additive masks, of all heads and of
    each, lengths, no rotary part, sinks, codes, pages, one token."""
    options = {"scale": 0.3}
    allowed = torch.arange(5) <= torch.arange(3).unsqueeze(-1) + 2
    yield Sample("indices", *chosen(sample(dtype, 0, 3), options))
    yield Sample("indices, one token", *chosen(sample(dtype, 1, 1), options))
    yield Sample("indices, bool mask", *chosen(sample(dtype, 2, 3, allowed), options))
    bias = Sampler(dtype, 3).normal(2, 3, 3, 5)
    yield Sample("indices, additive mask", *chosen(sample(dtype, 3, 3, bias), options))
    lens = torch.tensor([5, 3])
    yield Sample("indices, context_lens", *chosen((*sample(dtype, 4, 3), lens), options))
    yield Sample("indices, no rotary part", *chosen(without_rope(sample(dtype, 5, 3)), options))
    sinks = Sampler(dtype, 6).normal(3)
    yield Sample("indices, sinks", *chosen((*sample(dtype, 6, 3), None, sinks), options))
    yield Sample("indices, codes", *chosen(*in_codes(sample(dtype, 8, 3), options, (2, 1, 4))))
    paged = paged_sample(dtype, 7, 3, torch.tensor([600, 70]))
    yield Sample("indices, block_table, context_lens", *chosen(*paged, 640, 40))


def sample(
    dtype: torch.dtype, seed: int, steps: int, mask: Tensor | None = None, width: int = 4
) -> tuple[Any, ...]:
    """`width` is Dr."""
    batch, heads, context, rank = 2, 3, 5, 16
    draw = Sampler(dtype, seed)
    queries = draw.normal(batch, steps, heads, rank), draw.normal(batch, steps, heads, width)
    return (*queries, draw.normal(batch, context, rank), draw.normal(batch, context, width), mask)


def without_rope(args: tuple[Any, ...]) -> tuple[Any, ...]:
    query, _, latents, _, *rest = args
    return query, None, latents, None, *rest


def paged_sample(
    dtype: torch.dtype, seed: int, steps: int, lens: Tensor | None = None, width: int = 4
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pages of more than one tile; one is named from the end, and two sequences share one."""
    draw = Sampler(dtype, seed)
    query, query_rope, *_ = sample(dtype, seed, steps, width=width)
    table = torch.cat((torch.tensor([[3], [-2]]), draw.slots(2 * 9, 20).view(2, 9)), 1)
    caches = draw.normal(20, 64, query.shape[-1]), draw.normal(20, 64, query_rope.shape[-1])
    return (query, query_rope, *caches, None, lens, None, table), {"scale": 0.3}


def in_codes(
    args: tuple[Any, ...],
    options: dict[str, Any],
    shape: Sequence[int],
    codes: torch.dtype = torch.float8_e4m3fn,
    rotary: Sequence[int] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its latents in codes, with scales of a shape; and its rotary keys, if they have a shape."""
    latents, keys, draw = args[2], args[3], Sampler(torch.float32, sum(shape))
    step = 40 if codes == torch.int8 else 1

    def form(cache: Tensor) -> Tensor:
        return (cache * step).to(codes)

    def scales(shape: Sequence[int]) -> Tensor:
        return (draw.normal(*shape).abs() + 0.5) / step

    given = {"kv_scales": scales(shape)} | ({} if rotary is None else {"kr_scales": scales(rotary)})
    return (*args[:2], form(latents), keys if rotary is None else form(keys), *args[4:]), options | given


def in_fractals(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its pages in FRACTAL_NZ."""

    def form(pages: Tensor) -> Tensor:
        return pages.view(*pages.shape[:2], -1, 32 // pages.element_size()).transpose(1, 2).contiguous()

    return (*args[:2], *map(form, args[2:4]), *args[4:]), options


RESULTS = "out", "lse"

operator = define(
    "latent_attention", Arguments, body, returns=RESULTS, check=check, fake=fake, samples=samples, kernel=kernel
)
