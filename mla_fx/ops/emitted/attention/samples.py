"""Arguments to try attention with."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Given, Sample
from mla_fx.ops.common.sample import Sampler

from .chosen_rows import chosen
from .codes import CODES


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every call of attention alone and, without sinks, with logarithms."""
    for calls in (latent_samples, chosen_samples, head_samples, packed_samples):
        yield from with_sums(calls(dtype))


def with_sums(calls: Iterable[Sample]) -> Iterator[Sample]:
    """Yield each call, and again with logarithms if it has no sinks."""
    for one in calls:
        yield one
        if "sinks" not in one.mode:
            yield Sample(f"{one.mode}, return_lse", one.args, {**one.kwargs, "return_lse": True})


def latent_samples(dtype: torch.dtype) -> Iterator[Sample]:
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
) -> Given:
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
) -> Given:
    """Turn the latents of a call into codes with scales of a given shape. `rotary` does that to the rotary keys."""
    latents, keys, draw = args[2], args[3], Sampler(torch.float32, sum(shape))
    step = 40 if codes == torch.int8 else 1

    def form(cache: Tensor) -> Tensor:
        return (cache * step).to(codes)

    def scales(shape: Sequence[int]) -> Tensor:
        return (draw.normal(*shape).abs() + 0.5) / step

    given = {"kv_scales": scales(shape)} | ({} if rotary is None else {"kr_scales": scales(rotary)})
    return (*args[:2], form(latents), keys if rotary is None else form(keys), *args[4:]), options | given


def in_fractals(args: tuple[Any, ...], options: dict[str, Any]) -> Given:
    """Lay out the pages of a call in FRACTAL_NZ."""

    def form(pages: Tensor) -> Tensor:
        return pages.view(*pages.shape[:2], -1, 32 // pages.element_size()).transpose(1, 2).contiguous()

    return (*args[:2], *map(form, args[2:4]), *args[4:]), options


def head_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Expand keys and values of heads from the latents of these calls, in both forms."""
    for form, limit in (("expanded", 0), ("absorbed", 3)):
        for one in latent_samples(dtype):
            yield Sample(f"{form}, {one.mode}", *with_heads(one.args, one.kwargs | {"max_absorbed_tokens": limit}))
    for one in chosen_samples(dtype):
        yield Sample(f"heads, {one.mode}", *with_heads(one.args, one.kwargs))


def packed_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Sequences of different lengths, causal or not, without a rotary part, empty ones, one alone."""
    causal = {"scale": 0.3, "is_causal": True}
    yield Sample("lens, causal", *packed(dtype, 0, causal, 3, 1, 5))
    yield Sample("lens, all keys", *packed(dtype, 1, {"scale": 0.3}, 2, 4))
    args, options = packed(dtype, 2, causal, 4, 2)
    yield Sample("lens, no rotary part", without_rope(args), options)
    yield Sample("lens, empty sequences", *packed(dtype, 3, causal, 0, 3, 0, 2, 0))
    yield Sample("lens, one sequence", *packed(dtype, 4, causal, 5))


def packed(dtype: torch.dtype, seed: int, options: dict[str, Any], *lens: int) -> Given:
    """A call for sequences of these lengths."""
    draw, tokens, heads, rank, width = Sampler(dtype, seed), sum(lens), 3, 16, 4
    queries = draw.normal(1, tokens, heads, rank), draw.normal(1, tokens, heads, width)
    caches = draw.normal(1, tokens, rank), draw.normal(1, tokens, width)
    return with_heads((*queries, *caches, None), options | {"lens": [*lens]})


def with_heads(args: tuple[Any, ...], options: dict[str, Any]) -> Given:
    """Give a call queries [B, S, N, D] and weights."""
    query, *rest = args
    (heads, rank), nope, value, draw = query.shape[2:], 8, 6, Sampler(query.dtype)
    up = draw.weight(heads, nope + value, rank, fan_in=rank)
    weights = {"weight_uk": up[:, :nope], "weight_uv": up[:, nope:]}
    return (draw.normal(*query.shape[:3], nope), *rest), options | weights
