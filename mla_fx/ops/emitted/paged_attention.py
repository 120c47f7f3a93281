"""paged_attention.batched: the form of paged_attention that the compiler emits. Its lengths are on the device."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cast import i8_trunc
from mla_fx.ops.common.check import FLOATS, Sizes, check_devices, check_dtype, check_letters
from mla_fx.ops.common.define import Given, Sample, define
from mla_fx.ops.common.math import accumulation_dtype
from mla_fx.ops.common.paged import Tile, online_softmax, rounded_product
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true

from .attention.arguments import Scoring
from .attention.pages import check_block_table, gathered, tiles
from .attention.softmax import as_mask, check_mask, masked, share
from .attention.tiles import Form, at_once, attend, rows_first, seen_keys

MANY = 64  # query tokens, beside whose products a copy of the contexts costs little


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor | None = None
    mask: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    key_offset: Tensor | None = None
    value_offset: Tensor | None = None
    _: KW_ONLY
    scale: float
    fill: float | None = None
    dequant_dtype: torch.dtype | None = None


def body(a: Arguments) -> Tensor:
    """Attention of query tokens over the keys and values of their sequences in paged caches::

        key t of sequence b = key_cache[block_table[b, t // BlockSize], t % BlockSize]
        out = sum(P exp(s - m) value) / sum(exp(s - m)),  s = query . key * scale + mask

    in float32, or float64 for float64. P rounds to the dtype of query, and m is the maximum so far: the context is read
    in tiles and never copied. (Many tokens use PyTorch's own attention, where a copy costs little in comparison.) Query
    head n reads key head n // (H/Hkv).

    query is [B, S, H, D], key_cache [BlockNum, BlockSize, Hkv, D], value_cache [BlockNum, BlockSize, Hkv, Dv] with any
    strides: bfloat16, float16, float32 or float64; no cache is wider than query. BlockSize and BlockNum are free. The
    context of a sequence is the concatenation of the blocks in its row of block_table, int64 or int32 [B, Blocks]: T is
    Blocks * BlockSize. A negative number counts blocks from the end.

    A cache may be int8. Then it holds codes, and its numbers are

        key = (code + key_offset) * key_scale,  value = (code + value_offset) * value_scale

    in float32 at least, rounded to dequant_dtype, or to the dtype of query if that is None. Scales and offsets are
    [Hkv, D], or [Hkv, Dv] of values, in any floating dtype; without a scale it is 1, without an offset 0.

    context_lens, int64 [B] or [1], is the number of keys that the last row sees; each row before it sees one less: row
    s attends to keys t < context_lens[b] - S + 1 + s. It may be any number; past the ends of the context there is
    nothing to hide or to see. mask broadcasts to [B, H, S, T]: bool, where True may attend, or floating and added. At
    most one of the two is given. Where a bool mask is False or context_lens hides a key, the score is `fill`, or minus
    infinity if that is None. A row whose scores are all minus infinity gives zeros. A hidden score may be anything,
    even NaN, also where minus infinity is added to it.

    Unlike the other forms, which the vendor's document describes, this one reads no length on the host. So a graph can
    contain it, and a sequence without a context keeps its rows.

    Returns [B, S, H, Dv] in the dtype of query. Raises ValueError for arguments that do not fit. Inference only.
    """
    if a.query.shape[1] >= MANY and a.fill is None and (a.mask is None or a.mask.dtype == torch.bool):
        return from_copies(a)
    batch, steps, heads, _ = a.query.shape
    kv_heads, width = a.value_cache.shape[2:]
    dtype = accumulation_dtype(a.query.dtype)
    query = (a.query.to(dtype) * a.scale).transpose(1, 2).reshape(batch, kv_heads, -1, a.query.shape[3])
    like = query.new_empty(*query.shape[:3], width)
    most = share(a.block_table.shape[1] * a.key_cache.shape[1])  # of the values, because it divides at the end
    scaled = ((scores, values * most) for scores, values in _tiles(a, query))
    out, _ = online_softmax(scaled, rounded_product(a.query.dtype), like)
    return rows_first((out / most).view(batch, heads, steps, width).to(a.query.dtype))


def from_copies(a: Arguments, choose: Form = at_once) -> Tensor:
    """Compute `body` from a copy of the contexts."""
    heads = a.query.shape[2]
    keys, values = (
        rows.to(a.query.dtype).transpose(1, 2).repeat_interleave(heads // rows.shape[2], 1)
        for rows in _numbers(a, *(gathered(cache, a.block_table) for cache in (a.key_cache, a.value_cache)))
    )
    mask = as_mask(a.mask, a.context_lens, False, a.query, keys.shape[2])
    seen = seen_keys(mask)
    keys = keys if seen is None else keys.masked_fill(~seen.unsqueeze(1), 0)
    return rows_first(attend(a.query.transpose(1, 2), keys, values, mask, Scoring(a.scale, a.fill), choose=choose))


def _tiles(a: Arguments, query: Tensor) -> Iterator[Tile]:
    """Yield scores [B, Hkv, H/Hkv*S, W] and values [B, Hkv, W, Dv], a few pages at a time."""
    batch, steps, heads, _ = a.query.shape
    keys, values = (tiles(cache, a.block_table) for cache in (a.key_cache, a.value_cache))
    for (key, first, last), (value, _, _) in zip(keys, values, strict=True):
        key, value = _numbers(a, key, value)
        scores = query @ _by_head(key, query.dtype).mT
        mask = _mask(a, first, last)
        if mask is not None:
            scores = masked(scores.view(batch, heads, steps, -1), mask, a.fill).view(scores.shape)
        yield scores, _by_head(value, query.dtype)


def _numbers(a: Arguments, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [..., Hkv, D], dequantised if they are codes."""
    dtype = a.dequant_dtype or a.query.dtype
    keys = dequantised(keys, a.key_scale, a.key_offset, dtype)
    return keys, dequantised(values, a.value_scale, a.value_offset, dtype)


def dequantised(rows: Tensor, scale: Tensor | None, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers that rows [..., Hkv, D] of codes stand for, rounded once, to `dtype`. Other rows stay as they are."""
    if rows.dtype != torch.int8:
        return rows
    numbers = rows.to(accumulation_dtype(dtype))
    numbers = numbers if offset is None else numbers + offset
    return (numbers if scale is None else numbers * scale).to(dtype)


def _by_head(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, W, Hkv, D] as [B, Hkv, W, D], cast as it is read."""
    return rows.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _mask(a: Arguments, first: int, last: int) -> Tensor | None:
    """The part of the mask, or of what the lengths hide, for some keys."""
    if a.mask is None or a.mask.dim() == 0 or a.mask.shape[-1] == 1:
        return as_mask(a.mask, a.context_lens, False, a.query, last, first)
    return a.mask[..., first:last]


def check(a: Arguments) -> None:
    check_devices(vars(a))
    check_dtype("query", a.query, FLOATS)
    sizes: Sizes = {}
    check_letters(a, sizes, query="B, S, H, D", key_cache="BlockNum, BlockSize, Hkv, D")
    del sizes["BlockNum"]  # each has as many as it likes
    check_letters(a, sizes, value_cache="BlockNum, BlockSize, Hkv, Dv")
    narrower = [dtype for dtype in FLOATS if torch.promote_types(dtype, a.query.dtype) == a.query.dtype]
    for name, letters in (("key_cache", "Hkv, D"), ("value_cache", "Hkv, Dv")):
        check_dtype(name, getattr(a, name), (*narrower, torch.int8))
        check_channels(a, sizes, name, letters)
    sizes["N"], kv_heads = sizes["H"], sizes["Hkv"]
    if statically_known_true(sizes["H"] % kv_heads != 0):
        raise ValueError(f"query has {sizes['H']} heads, key_cache {kv_heads}; the latter must divide the former.")
    if a.dequant_dtype not in (None, *narrower):
        raise ValueError(f"dequant_dtype is {a.dequant_dtype}; allowed: {', '.join(map(str, narrower))}.")
    check_block_table(a, sizes, "key_cache", "value_cache")
    check_mask(a.mask, a.context_lens, False, a.fill, sizes)


def check_channels(a: Any, sizes: Sizes, cache: str, letters: str) -> None:
    """Check what belongs to the codes of `cache`, such as key_scale and key_offset of key_cache."""
    for part in ("scale", "offset"):
        name = cache.replace("cache", part)
        given, stored = getattr(a, name), getattr(a, cache).dtype
        if given is None:
            continue
        if stored != torch.int8:
            raise ValueError(f"{name} is given and {cache} has dtype {stored}; it must be torch.int8.")
        check_dtype(name, given, FLOATS)
        check_letters(a, sizes, **{name: letters})


def fake(a: Arguments) -> Tensor:
    return a.query.new_empty(*a.query.shape[:3], a.value_cache.shape[3])


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """One token and several, lengths, bool and additive masks, a row that sees nothing or is filled; grouped heads, one
    key head, values of another width; codes."""
    lens, short = torch.tensor([70, 3]), torch.tensor([-1, 600])
    bias = Sampler(dtype, 9).normal(2, 4, 3, SPAN)
    allowed = torch.arange(SPAN) % 7 <= torch.arange(3).unsqueeze(-1)
    turns = torch.arange(SPAN) % 7 <= torch.arange(MANY).unsqueeze(-1) % 7
    blind = allowed & (torch.arange(3) != 1).unsqueeze(-1)
    yield Sample("no mask", sample(dtype, 0, 1), {"scale": 0.3})
    yield Sample("context_lens", (*sample(dtype, 1, 1), lens), {"scale": 0.3})
    yield Sample("context_lens", (*sample(dtype, 2, 3), lens), {"scale": 0.3})
    yield Sample("context_lens, one for all", (*sample(dtype, 3, 3), lens[:1]), {"scale": 0.3})
    yield Sample("context_lens beyond the context", (*sample(dtype, 4, 3), short), {"scale": 0.3})
    yield Sample("context_lens, fill", (*sample(dtype, 5, 3), short), {"scale": 0.3, "fill": -1.5})
    yield Sample("bool mask", (*sample(dtype, 6, 3), None, blind), {"scale": 0.3})
    yield Sample("bool mask, fill", (*sample(dtype, 7, 3), None, blind), {"scale": 0.3, "fill": -1.5})
    yield Sample("additive mask", (*sample(dtype, 8, 3), None, bias), {"scale": 0.3})
    yield Sample("one key head", (*sample(dtype, 9, 3, kv_heads=1), lens), {"scale": 0.3})
    yield Sample("many tokens", (*sample(dtype, 11, MANY), torch.tensor([5, 300])), {"scale": 0.3})
    yield Sample("many tokens, bool mask", (*sample(dtype, 12, MANY), None, turns), {"scale": 0.3})
    yield Sample("a mask of one column", (*sample(dtype, 10, 3), None, allowed[:, :1]), {"scale": 0.3})
    yield Sample("int8 caches", *in_codes(dtype, 13, 1, lens, offsets=False))
    yield Sample("int8 caches, offsets", *in_codes(dtype, 14, 3, lens))
    yield Sample("int8 caches, many tokens", *in_codes(dtype, 15, MANY, torch.tensor([5, 300])))


SPAN = 9 * 64  # more than one tile


def sample(dtype: torch.dtype, seed: int, steps: int, kv_heads: int = 2) -> tuple[Any, ...]:
    """Pages; one is named from the end, and two sequences share one."""
    draw = Sampler(dtype, seed)
    table = torch.cat((torch.tensor([[3], [-2]]), draw.slots(2 * 8, 20).view(2, 8)), 1)
    caches = draw.normal(20, 64, kv_heads, 16), draw.normal(20, 64, kv_heads, 8)
    return draw.normal(2, steps, 4, 16), *caches, table


def in_codes(dtype: torch.dtype, seed: int, steps: int, lens: Tensor, offsets: bool = True) -> Given:
    """A sample whose caches hold codes."""
    query, *caches, table = sample(dtype, seed, steps)
    draw = Sampler(dtype, seed + 100)
    codes = [i8_trunc(40 * cache) for cache in caches]
    scales = [(1 + 0.3 * draw.normal(*cache.shape[2:])) / 40 for cache in caches]
    given = scales + [10 * draw.normal(*cache.shape[2:]) for cache in caches] if offsets else scales
    return (query, *codes, table, lens, None, *given), {"scale": 0.3}


operator = define("paged_attention.batched", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)
