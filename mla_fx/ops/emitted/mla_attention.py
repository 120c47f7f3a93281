"""mla_attention: attention of plain MLA queries over the compressed latents, in whichever form is cheaper."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.absorption import absorb_query, expand_output
from mla_fx.ops.common.check import check_letters
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.machine import multiplies_tiles
from mla_fx.ops.common.math import wide_product
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true

from . import latent_attention
from .attention import as_mask, check_mask, check_sinks, fake_sums, probabilities
from .chosen_rows import check_indices
from .packed_sequences import check_lens, one_by_one
from .pages import check_operands, context_of, unpaged, without_codes
from .tiled_attention import Form, at_once, attend, count_of_scores, mask_of_rows, parts, row_tiles, seen_keys

EXPONENT = 0x7F800000  # the bits of a float32 that make a power of two
CHOOSES = "it chooses its form by the number of query tokens of each call"
FEW_SCORES = 2**23  # measured: 724 tokens of 16 heads, 256 of 128
WITHOUT_TILES = 4  # times as many on a CPU without AMX; measured
ROWS = 256  # query tokens that choose keys and are absorbed at a time
PAYS, READ = 3, 64  # times a chosen key; measured on a CPU without AMX, of 16, 64 and 128 heads

Results = tuple[Tensor, Tensor]
Attend = Callable[[latent_attention.Arguments], Results]


@dataclass(frozen=True)
class Arguments:
    q_nope: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    weight_uk: Tensor
    weight_uv: Tensor
    mask: Tensor | None
    context_lens: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    kv_scales: Tensor | None = None
    kr_scales: Tensor | None = None
    indices: Tensor | None = None
    lens: list[int] | None = None
    _: KW_ONLY
    scale: float
    is_causal: bool = False
    fill: float | None = None
    max_absorbed_tokens: int = 0
    return_lse: bool = False


def body(a: Arguments) -> Results:
    """Attention of N heads whose keys and values are expanded from one latent::

        k_nope[n] = weight_uk[n] kv_cache;  v[n] = weight_uv[n] kv_cache
        s         = (q_nope . k_nope + q_rope . kr_cache) * scale + mask
        out       = softmax(s) . v
        lse       = log(sum(exp(s)))

    Up to max_absorbed_tokens query tokens, this is computed in the latent space (`absorbed`), beyond that as written
    (`expanded`). The choice is made at run time, by the S of the call.

    q_nope is [B, S, N, D], q_rope [B, S, N, Dr], kv_cache [B, T, Hckv], kr_cache [B, T, Dr], weight_uk [N, D, Hckv],
    weight_uv [N, Dv, Hckv], all of one dtype: bfloat16, float16, float32 or float64; weights may have any strides.
    q_rope and kr_cache are None if there is no rotary part.

    mask broadcasts to [B, N, S, T]: bool, where True may attend, or floating and added. context_lens, int64 [B] or [1],
    is the number of keys that the last row sees; each row before it sees one less: row s attends to keys
    t < context_lens[b] - S + 1 + s, for any number. is_causal lets row s attend to keys t <= s. At most one of the
    three is given. Where a bool mask is False or context_lens hides a key, the score is `fill`, or minus infinity if
    that is None. A row whose scores are all minus infinity gives zeros. So a row without visible keys gives zeros or,
    with `fill`, the mean of all T values. A hidden score may be anything, even NaN, also where minus infinity is added
    to it.

    sinks, [N] in any floating dtype, adds one score to each row of a head, neither scaled nor masked. Its probability
    is dropped, so the keys' probabilities sum to less than one. The softmax runs in float32 (float64 for float64);
    probabilities are rounded to the dtype of q_nope.

    With a block_table, int64 or int32 [B, Blocks], the caches are pages [BlockNum, BlockSize, Hckv] and [BlockNum,
    BlockSize, Dr], or both in FRACTAL_NZ, as for `latent_attention`. The context of a sequence is the concatenation of
    the blocks in its row: T is Blocks * BlockSize. A negative number counts blocks from the end.

    kv_scales and kr_scales are those of `latent_attention`: caches may hold codes, which become numbers in the dtype of
    q_nope.

    With indices, int64 or int32 [B, S, 1, K], a query sees no keys but those it chose, as for `latent_attention`; each
    is named once. The result is the same in whichever form it is computed: of absorbed queries over chosen keys, or
    over all keys under a mask. Beyond max_absorbed_tokens query tokens, keys and values are expanded for the latter.

    With lens, the numbers of tokens of one or more sequences, these follow one another in one row, B = 1 and S = T,
    and each attends to itself alone, in the expanded form::

        out = cat(mla_attention(q_nope[:, i], q_rope[:, i], kv_cache[:, i], kr_cache[:, i]) for the tokens i of each)

    They sum to S, and a sequence may be empty. Nothing but is_causal hides keys then: lens go with no mask, lengths,
    sinks, pages, codes or indices.

    Returns out, [B, S, N, Dv], and lse, which is that of `latent_attention`: an empty tensor without return_lse. Raises
    ValueError for arguments that do not fit. Inference only. Tracing this function with a symbolic S guards on the
    comparison; trace `absorbed` or `expanded` to avoid that.
    """
    if a.lens is not None:
        return one_by_one(a, expanded)
    return absorbed(a) if a.indices is not None or is_absorbed(a) else expanded(a)


def kernel(a: Arguments, attend: Attend = latent_attention.kernel) -> Results:
    """The same in memory that does not grow with S * T."""
    if a.lens is not None:
        return one_by_one(a, lambda sequence: kernel(sequence, attend))
    if a.indices is not None:
        return by_rows(a, attend)
    if is_absorbed(a):
        return absorbed(a, attend)
    if a.return_lse:
        return in_tiles(a)
    return expanded(a) if has_few_scores(a) else tiled(a)


def by_rows(a: Arguments, attend: Attend) -> Results:
    """`absorbed` by tiles of query rows: absorbed queries are several times as large as plain ones."""
    tiles = parts(max(1, a.q_nope.shape[1]), ROWS)  # at least one: none of no rows
    return latent_attention.concatenated(absorbed(_of_rows(a, *rows), attend) for rows in tiles)


def _of_rows(a: Arguments, first: int, last: int) -> Arguments:
    behind = a.q_nope.shape[1] - last
    return replace(
        a,
        q_nope=a.q_nope[:, first:last],
        q_rope=None if a.q_rope is None else a.q_rope[:, first:last],
        indices=None if a.indices is None else a.indices[:, first:last],
        mask=mask_of_rows(a.mask, first, last),
        context_lens=None if a.context_lens is None else a.context_lens - behind,
    )


def fewest(chosen: int, heads: int) -> int:
    """The number of keys from which on a prompt that reads the chosen ones alone takes less time. Heads share what is
    read."""
    return PAYS * chosen + READ * chosen // heads


def is_absorbed(a: Arguments) -> bool:
    return a.max_absorbed_tokens != 0 and a.q_nope.shape[1] <= a.max_absorbed_tokens


def is_chosen_at_run_time(a: Arguments) -> bool:
    """Whether a trace does not know the number of query tokens, by which a call chooses its form."""
    return a.max_absorbed_tokens != 0 and isinstance(a.q_nope.shape[1], torch.SymInt)


def is_masked(a: Arguments) -> bool:
    return a.mask is not None or a.context_lens is not None


def has_few_scores(a: Arguments) -> bool:
    """Whether PyTorch's own attention is slower than plain products."""
    scores = count_of_scores(a.q_nope, context_of(a.kv_cache, a.block_table))
    few = FEW_SCORES * (1 if multiplies_tiles() else WITHOUT_TILES)
    return a.q_nope.device.type == "cpu" and scores is not None and scores <= few


def absorbed(a: Arguments, attend: Attend = latent_attention.body) -> Results:
    """The latent form: cost grows with S * T * Hckv, and nothing is expanded."""
    latent, lse = attend(in_latent_space(a))
    return expand_output(latent, a.weight_uv), lse


def in_latent_space(a: Arguments) -> latent_attention.Arguments:
    query = absorbed_query(a.q_nope, a.weight_uk)
    a = a if query.dtype == a.q_nope.dtype else without_codes(a)  # their numbers have the dtype of the query
    operands = query, a.q_rope, a.kv_cache, a.kr_cache, a.mask, a.context_lens, a.sinks, a.block_table
    rest = a.kv_scales, a.kr_scales, a.indices
    own = latent_attention.Arguments(*operands, *rest, scale=a.scale, is_causal=a.is_causal, fill=a.fill)
    return replace(own, return_lse=a.return_lse)


def absorbed_query(q_nope: Tensor, weight_uk: Tensor) -> Tensor:
    """The absorbed query [B, S, N, Hckv]; in float32 for float16, whose range it may leave.

    For float16, each row is divided by a power of two, so that no sum exceeds the largest weight. That rounds only
    elements below 2**-17 of the largest. The result is multiplied by it again."""
    if q_nope.dtype != torch.float16:
        return absorb_query(q_nope, weight_uk)
    most = q_nope.abs().amax(-1, keepdim=True).float() * (2 * q_nope.shape[-1])
    power = (most.view(torch.int32) & EXPONENT).view(torch.float32).clamp(min=1)  # between most / 2 and most
    return absorb_query((q_nope / power).to(q_nope.dtype), weight_uk) * power


def expanded(a: Arguments) -> Results:
    """The per-head form: keys and values are expanded once; then cost grows with S * T * (D + Dv)."""
    scores, value = operands(a)
    return weighted(*scores, value, a)


def weighted(latent: Tensor, rotated: Tensor | None, mask: Tensor | None, value: Tensor, a: Arguments) -> Results:
    """The results for parts of the scores [B, N, S, T] and values [B, N, T, Dv]."""
    weights, lse = probabilities(latent, rotated, mask, a.scale, a.fill, a.sinks, return_lse=a.return_lse)
    out = (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
    return out, lse.transpose(1, 2).contiguous() if a.return_lse else lse


def in_tiles(a: Arguments) -> Results:
    """`expanded` by tiles of query rows."""
    a = unpaged(a)
    query, key, value = joined(a, None)
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.q_nope, key.shape[2])
    return latent_attention.concatenated(
        weighted(wide_product(query[:, :, first:last], key.mT), None, mask_of_rows(mask, first, last), value, a)
        for first, last in row_tiles(a.q_nope, key.shape[2])
    )


def operands(a: Arguments) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """The latent and rotary part of the scores [B, N, S, T] with the mask, and the values [B, N, T, Dv]."""
    a = unpaged(a)
    both = torch.einsum("btr,ndr->bntd", a.kv_cache, torch.cat((a.weight_uk, a.weight_uv), 1))
    k_nope, value = torch.split(both, [a.weight_uk.shape[1], a.weight_uv.shape[1]], -1)
    k_nope = k_nope.mT
    latent = wide_product(a.q_nope.transpose(1, 2), k_nope)
    rotated = None
    if a.q_rope is not None and a.kr_cache is not None:
        # All heads share kr_cache: one product over N*S rows; broadcasting would copy it for every head.
        rotated = wide_product(a.q_rope.transpose(1, 2).flatten(1, 2), a.kr_cache.mT).view(latent.shape)
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.q_nope, a.kv_cache.shape[1])
    return (latent, rotated, mask), value


def tiled(a: Arguments, choose: Form = at_once) -> Results:
    """`expanded` without logarithms in memory that does not grow with S * T: the nope and rotary parts of keys are
    joined."""
    a = unpaged(a)
    mask = as_mask(a.mask, a.context_lens, False, a.q_nope, a.kv_cache.shape[1])
    out = attend(*joined(a, seen_keys(mask)), mask, a.scale, a.is_causal, a.fill, a.sinks, choose)
    return out.transpose(1, 2).contiguous(), fake_sums(a.q_nope, return_lse=False)


def joined(a: Arguments, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, N, S, D + Dr], keys [B, N, T, D + Dr] and values [B, N, T, Dv]; keys that are not seen are zeros."""
    latents, rotary = a.kv_cache, a.kr_cache
    if seen is not None:
        latents, rotary = latents.masked_fill(~seen, 0), None if rotary is None else rotary.masked_fill(~seen, 0)
    query, key = a.q_nope, torch.einsum("btr,ndr->btnd", latents, a.weight_uk)
    if a.q_rope is not None and rotary is not None:
        query = torch.cat((query, a.q_rope), -1)
        key = torch.cat((key, rotary.unsqueeze(2).expand(-1, -1, key.shape[2], -1)), -1)
    value = torch.einsum("btr,nvr->btnv", a.kv_cache, a.weight_uv)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def check(a: Arguments) -> None:
    sizes = check_operands(a, "B, S, N, D", "indices")
    check_letters(a, sizes, weight_uk="N, D, Hckv", weight_uv="N, Dv, Hckv")
    check_mask(a.mask, a.context_lens, a.is_causal, a.fill, sizes)
    check_sinks(a, sizes)
    check_indices(a, sizes)
    check_lens(a, sizes)
    if statically_known_true(a.max_absorbed_tokens < 0):
        raise ValueError(f"max_absorbed_tokens is {a.max_absorbed_tokens}; it must be 0 or more.")


def fake(a: Arguments) -> Results:
    out = a.q_nope.new_empty(*a.q_nope.shape[:3], a.weight_uv.shape[1])
    return out, fake_sums(a.q_nope, a.return_lse)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every call of attention alone and, without sinks, with logarithms."""
    yield from latent_attention.with_sums(attention_samples(dtype))


def attention_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Both forms with every kind of mask, without a rotary part, and with sinks."""
    bias = Sampler(dtype, 9).normal(2, 3, 3, 5)
    allowed = torch.arange(5) <= torch.arange(3).unsqueeze(-1) + 2
    yield Sample("expanded", sample(dtype, 0), {"scale": 0.3})
    yield Sample("absorbed", sample(dtype, 0), {"scale": 0.3, "max_absorbed_tokens": 3})
    yield Sample("expanded, causal", sample(dtype, 1), {"scale": 0.3, "is_causal": True})
    yield Sample("absorbed, causal", sample(dtype, 1), {"scale": 0.3, "is_causal": True, "max_absorbed_tokens": 3})
    yield Sample("expanded, bool mask", sample(dtype, 2, mask=allowed), {"scale": 0.5, "max_absorbed_tokens": 2})
    yield Sample("absorbed, additive mask", sample(dtype, 3, mask=bias), {"scale": 0.25, "max_absorbed_tokens": 8})
    yield Sample("absorbed", sample(dtype, 4, steps=1), {"scale": 0.3, "max_absorbed_tokens": 1})
    blind = allowed & (torch.arange(3) != 1).unsqueeze(-1)
    filled = {"scale": 0.3, "fill": -1.5}
    yield Sample("expanded, bool mask, fill", sample(dtype, 5, mask=blind), filled)
    yield Sample("absorbed, bool mask, fill", sample(dtype, 5, mask=blind), filled | {"max_absorbed_tokens": 3})
    lens, short = torch.tensor([5, 3]), torch.tensor([2])
    yield Sample("expanded, context_lens", (*sample(dtype, 6), lens), {"scale": 0.3})
    yield Sample("absorbed, context_lens", (*sample(dtype, 6), lens), {"scale": 0.3, "max_absorbed_tokens": 3})
    yield Sample("expanded, context_lens, fill", (*sample(dtype, 7), short), filled)
    yield Sample(
        "absorbed, context_lens", (*sample(dtype, 8, steps=1), short), {"scale": 0.3, "max_absorbed_tokens": 1}
    )
    sinks = Sampler(dtype, 9).normal(3)
    unrotated, rotated = latent_attention.without_rope(sample(dtype, 9)), sample(dtype, 10, mask=allowed)
    for form, limit in (("expanded", 0), ("absorbed", 3)):
        options = {"scale": 0.3, "max_absorbed_tokens": limit}
        yield Sample(f"{form}, no rotary part", unrotated, options)
        yield Sample(f"{form}, bool mask, sinks", (*rotated, None, sinks), options)
        yield Sample(f"{form}, context_lens, sinks, no rotary part", (*unrotated, short, sinks), options)

    for limit, name in ((0, "expanded"), (3, "absorbed")):
        args, options = latent_attention.in_codes(sample(dtype, 13), {"scale": 0.3}, (2, 5, 4))
        yield Sample(f"{name}, codes", args, options | {"max_absorbed_tokens": limit})
        query, rope, *_, uk, uv, _ = sample(dtype, 11)
        (_, _, *pages, _, lens, _, table), _ = latent_attention.paged_sample(dtype, 11, 3, torch.tensor([70, 3]))
        options = {"scale": 0.3, "max_absorbed_tokens": limit}
        yield Sample(f"{name}, block_table", (query, rope, *pages, uk, uv, None, lens, None, table), options)
        (_, rope, *pages, _, lens, _, table), _ = latent_attention.in_fractals(
            *latent_attention.paged_sample(dtype, 12, 3, torch.tensor([70, 3]), 16)
        )
        yield Sample(f"{name}, block_table, NZ", (query, rope, *pages, uk, uv, None, lens, None, table), options)
    queries = sample(dtype, 0)
    for one in latent_attention.chosen_samples(dtype):
        steps = one.args[0].shape[1]
        rope = None if one.args[1] is None else queries[1][:, :steps]
        operands = queries[0][:, :steps], rope, *one.args[2:4], *queries[4:6], *one.args[4:]
        yield Sample(one.mode, operands, one.kwargs)
    yield from packed_samples(dtype)


def packed_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Sequences of different lengths, causal or not, without a rotary part, empty ones, one alone."""
    causal = {"scale": 0.3, "is_causal": True}
    yield Sample("lens, causal", *packed(dtype, 0, causal, 3, 1, 5))
    yield Sample("lens, all keys", *packed(dtype, 1, {"scale": 0.3}, 2, 4))
    args, options = packed(dtype, 2, causal, 4, 2)
    yield Sample("lens, no rotary part", latent_attention.without_rope(args), options)
    yield Sample("lens, empty sequences", *packed(dtype, 3, causal, 0, 3, 0, 2, 0))
    yield Sample("lens, one sequence", *packed(dtype, 4, causal, 5))


def packed(
    dtype: torch.dtype, seed: int, options: dict[str, Any], *lens: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call for sequences of these lengths."""
    *_, weight_uk, weight_uv, _ = sample(dtype, seed)
    draw, tokens, (heads, nope, rank), width = Sampler(dtype, seed), sum(lens), weight_uk.shape, 4
    queries = draw.normal(1, tokens, heads, nope), draw.normal(1, tokens, heads, width)
    caches = draw.normal(1, tokens, rank), draw.normal(1, tokens, width)
    return (*queries, *caches, weight_uk, weight_uv, None), options | {"lens": [*lens]}


def sample(dtype: torch.dtype, seed: int, steps: int = 3, mask: Tensor | None = None) -> tuple[Any, ...]:
    batch, heads, context, nope, rank, width, value = 2, 3, 5, 8, 16, 4, 6
    draw = Sampler(dtype, seed)
    up = draw.weight(heads, nope + value, rank, fan_in=rank)
    return (
        draw.normal(batch, steps, heads, nope),
        draw.normal(batch, steps, heads, width),
        draw.normal(batch, context, rank),
        draw.normal(batch, context, width),
        up[:, :nope],
        up[:, nope:],
        mask,
    )


operator = define(
    "mla_attention", Arguments, body, returns=latent_attention.RESULTS, check=check, fake=fake, samples=samples,
    kernel=kernel,
)
