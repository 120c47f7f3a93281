"""attention: attention over the latents of MLA, of absorbed queries or of heads whose keys are expanded from them."""

from torch import Tensor

from mla_fx.ops.common.check import Sizes, check_letters
from mla_fx.ops.common.define import define
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import RESULTS, Arguments, Attend, Results, is_absorbed
from .chosen_rows import check_indices
from .codes import check_latents
from .heads import absorbed, by_rows, expanded, in_tiles, tiled
from .latents import by_tiles, over_latents
from .pages import check_contexts, context_of
from .parts import check_lens, one_by_one
from .samples import samples
from .softmax import check_mask, check_sinks, fake_sums
from .tiles import fit_a_tile


def body(a: Arguments) -> Results:
    """Attention over latents. All heads share the latent of a token, which is its key and its value::

        s   = (query . kv_cache + query_rope . kr_cache) * scale + mask
        out = softmax(s) . kv_cache
        lse = log(sum(exp(s)))

    query is [B, S, N, Hckv], query_rope [B, S, N, Dr], kv_cache [B, T, Hckv], kr_cache [B, T, Dr], all of one dtype:
    bfloat16, float16, float32 or float64. query_rope and kr_cache are None if there is no rotary part.

    With weights of any strides, weight_uk [N, D, Hckv] and weight_uv [N, Dv, Hckv], query is [B, S, N, D], and keys and
    values of each head are expanded from the latents::

        k[n] = weight_uk[n] kv_cache;  v[n] = weight_uv[n] kv_cache
        s    = (query . k + query_rope . kr_cache) * scale + mask
        out  = softmax(s) . v

    Up to max_absorbed_tokens query tokens, this is computed in the latent space (`absorbed`), beyond that as written
    (`expanded`). The choice is made at run time, by the S of the call.

    mask broadcasts to [B, N, S, T]: bool, where True may attend, or floating and added. context_lens, int64 [B] or [1],
    is the number of keys that the last row sees; each row before it sees one less: row s attends to keys
    t < context_lens[b] - S + 1 + s. It may be any number; past the ends of the cache there is nothing to hide or to
    see. is_causal lets row s attend to keys t <= s. At most one of the three is given. Where a bool mask is False or
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
    whole context is never copied, unless it is expanded.

    Caches may hold codes, int8 or float8 (e4m3fn, e5m2), which are numbers when they are multiplied by scales in
    float32 and rounded to the dtype of query. kv_scales, floating, broadcasts to [B, T, C], or to [BlockNum, BlockSize,
    C] with a block_table: each scale is of Hckv / C adjacent columns, so C is 1 for a scale of each token, and Hckv for
    one of each column. kr_scales are the same for kr_cache; without them, kr_cache has the dtype of query. There are
    no codes in FRACTAL_NZ. Beside scales in float64, codes may be float64, in which a rewrite is checked.

    With indices, int64 or int32 [B, S, 1, K], a query sees no keys but those it chose::

        t   = indices[b, s, 0]
        out = softmax((query . kv_cache[t] + query_rope . kr_cache[t]) * scale + mask[t]) . kv_cache[t]

    They are numbers of tokens in the context of the sequence, below T, in any order. Negative numbers are no keys, and
    come last. A key that is named twice counts twice; with weights, each is named once. All heads see the same keys, as
    far as mask or context_lens allow; there is no is_causal, no `fill`, and no FRACTAL_NZ. No more than K rows of a
    context are read for a query; with weights beyond max_absorbed_tokens, all are, and a mask hides the others.
    Caches with a gap between sequences are copied, so give the whole of one, with lengths, and not a slice.

    With weights and lens, the numbers of tokens of one or more sequences, these follow one another in one row, B = 1
    and S = T, and each attends to itself alone, in the expanded form::

        out = cat(attention(query[:, i], query_rope[:, i], kv_cache[:, i], kr_cache[:, i]) for the tokens i of each)

    They sum to S, and a sequence may be empty. Nothing but is_causal hides keys then: lens go with no mask, lengths,
    sinks, pages, codes or indices.

    Attention over parts of a context, each with its lse, is merged to attention over the whole::

        lse = logsumexp(lses);  out = sum(exp(lses - lse) * outs)

    Returns out, [B, S, N, Hckv], or [B, S, N, Dv] with weights, and lse: with return_lse, [B, S, N] in float32, or
    float64 for float64, natural logarithms, and minus infinity for a row whose scores all are, so that it adds nothing
    to others; else an empty tensor. There are no sinks with return_lse. Raises ValueError for arguments that do not
    fit. Inference only. With weights, tracing this function with a symbolic S guards on the comparison; trace
    `absorbed` or `expanded` to avoid that.
    """
    if a.weight_uk is None:
        return over_latents(a)
    if a.lens is not None:
        return one_by_one(a, expanded)
    return absorbed(a) if a.indices is not None or is_absorbed(a) else expanded(a)


def kernel(a: Arguments, attend: Attend = by_tiles) -> Results:
    """Compute `body` in memory that does not grow with S * T."""
    if a.weight_uk is None:
        return attend(a)
    if a.lens is not None:
        return one_by_one(a, lambda sequence: kernel(sequence, attend))
    if a.indices is not None:
        return by_rows(a, attend)
    if is_absorbed(a):
        return absorbed(a, attend)
    if a.return_lse:
        return in_tiles(a)
    return expanded(a) if fit_a_tile(a.query, context_of(a.kv_cache, a.block_table)) else tiled(a)


def check(a: Arguments) -> None:
    check_latents(a, "mask", "context_lens", "block_table", "indices")
    _check_weights(a)
    sizes: Sizes = {}
    check_letters(a, sizes, query="B, S, N, Hckv" if a.weight_uk is None else "B, S, N, D")
    _check_rotary(a)
    check_letters(a, sizes, query_rope="B, S, N, Dr")
    check_contexts(a, sizes)
    check_letters(a, sizes, weight_uk="N, D, Hckv", weight_uv="N, Dv, Hckv")
    check_mask(a.mask, a.context_lens, a.is_causal, a.fill, sizes)
    check_sinks(a, sizes)
    check_indices(a, sizes)
    check_lens(a, sizes)
    if statically_known_true(a.max_absorbed_tokens < 0):
        raise ValueError(f"max_absorbed_tokens is {a.max_absorbed_tokens}; it must be 0 or more.")


def _check_weights(a: Arguments) -> None:
    if (a.weight_uk is None) != (a.weight_uv is None):
        given, missing = ("weight_uk", "weight_uv") if a.weight_uv is None else ("weight_uv", "weight_uk")
        raise ValueError(f"{given} is given and {missing} is None; heads are expanded by both, or by none.")
    if a.weight_uk is None and a.lens is not None:
        raise ValueError("lens are given and weight_uk is None; packed sequences are expanded, so they need weights.")


def _check_rotary(a: Arguments) -> None:
    if (a.query_rope is None) != (a.kr_cache is None):
        given, missing = ("query_rope", "kr_cache") if a.kr_cache is None else ("kr_cache", "query_rope")
        raise ValueError(f"{given} is given and {missing} is None; a rotary part has both, or there is none.")


def fake(a: Arguments) -> Results:
    return room(a), fake_sums(a.query, a.return_lse)


def room(a: Arguments) -> Tensor:
    columns = a.query.shape[3] if a.weight_uv is None else a.weight_uv.shape[1]
    return a.query.new_empty(*a.query.shape[:3], columns)


operator = define(
    "attention", Arguments, body, returns=RESULTS, check=check, fake=fake, samples=samples, kernel=kernel
)
