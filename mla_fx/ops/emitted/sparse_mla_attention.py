"""sparse_mla_attention: attention of plain MLA queries over chosen keys, for prompts."""

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from mla_fx.ops.common.absorption import expand_output
from mla_fx.ops.common.check import check_letters
from mla_fx.ops.common.define import Sample, define

from . import mla_attention, sparse_latent_attention
from .attention import aligned, as_mask, check_mask, masked
from .pages import check_operands, context_of, without_codes
from .tiled_attention import mask_of_rows, parts

ROWS = 256  # query tokens that are absorbed at a time
PAYS, READ = 3, 64  # times a chosen key; measured on a CPU without AMX, of 16, 64 and 128 heads

Attend = Callable[[sparse_latent_attention.Arguments], Tensor]


@dataclass(frozen=True)
class Arguments:
    q_nope: Tensor
    q_rope: Tensor | None
    kv_cache: Tensor
    kr_cache: Tensor | None
    weight_uk: Tensor
    weight_uv: Tensor
    indices: Tensor
    mask: Tensor | None = None
    context_lens: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None
    kv_scales: Tensor | None = None
    kr_scales: Tensor | None = None
    _: KW_ONLY
    scale: float
    max_absorbed_tokens: int = 0


def body(a: Arguments) -> Tensor:
    """The attention of `mla_attention`, in which each query sees no keys but those it chose::

        t   = indices[b, s, 0]
        out = softmax((q_nope . k_nope[t] + q_rope . kr_cache[t]) * scale + mask[t]) . v[t]

    q_nope, q_rope, kv_cache, kr_cache, weight_uk, weight_uv, scale, mask, context_lens, sinks, block_table, kv_scales
    and kr_scales are those of `mla_attention`, and mean the same; masks have no `fill`, and caches are not in
    FRACTAL_NZ. indices, int64 or int32 [B, S, 1, K], are numbers of tokens in the context of the sequence, below T, in
    any order; each is named once. Negative numbers are no keys, and come last. All heads see the same keys, as far as
    the mask allows. A row without visible keys gives zeros.

    The result is the same in whichever form it is computed: of absorbed queries over chosen keys, or over all keys
    under a mask. Beyond max_absorbed_tokens query tokens, keys and values are expanded for the latter.

    Returns [B, S, N, Dv]. Raises ValueError for arguments that do not fit. Inference only.
    """
    return absorbed(a, sparse_latent_attention.body)


def fewest(chosen: int, heads: int) -> int:
    """The number of keys from which on a prompt that reads the chosen ones alone takes less time. Heads share what is
    read."""
    return PAYS * chosen + READ * chosen // heads


def kernel(a: Arguments, attend: Attend = sparse_latent_attention.body) -> Tensor:
    """The same by tiles of query rows: absorbed queries are several times as large as plain ones."""
    out = fake(a)
    for first, last in parts(a.q_nope.shape[1], ROWS):
        out[:, first:last] = absorbed(_of_rows(a, first, last), attend)
    return out


def absorbed(a: Arguments, attend: Attend) -> Tensor:
    query = mla_attention.absorbed_query(a.q_nope, a.weight_uk)
    a = a if query.dtype == a.q_nope.dtype else without_codes(a)
    operands = query, a.q_rope, a.kv_cache, a.kr_cache, a.indices, a.mask, a.context_lens, a.sinks, a.block_table
    scales = a.kv_scales, a.kr_scales
    return expand_output(attend(sparse_latent_attention.Arguments(*operands, *scales, scale=a.scale)), a.weight_uv)


def _of_rows(a: Arguments, first: int, last: int) -> Arguments:
    behind = a.q_nope.shape[1] - last
    return replace(
        a,
        q_nope=a.q_nope[:, first:last],
        q_rope=None if a.q_rope is None else a.q_rope[:, first:last],
        indices=a.indices[:, first:last],
        mask=mask_of_rows(a.mask, first, last),
        context_lens=None if a.context_lens is None else a.context_lens - behind,
    )


def over_all(a: Arguments) -> mla_attention.Arguments:
    """The same as attention to all keys under a mask."""
    batch, steps, _, _ = a.indices.shape
    context = context_of(a.kv_cache, a.block_table)
    mask = a.indices.new_zeros(batch, steps, context + 1, dtype=torch.bool)  # the last place is of no key
    keys = a.indices.squeeze(2).to(torch.int64)
    mask = mask.scatter_(-1, keys.masked_fill(keys < 0, context), True)[..., :context].unsqueeze(1)
    given = as_mask(a.mask, a.context_lens, False, a.q_nope, context)
    if given is not None:
        given = aligned(given, rows_first=False)
        mask = mask & given if given.dtype == torch.bool else masked(given, mask, None)
    operands = a.q_nope, a.q_rope, a.kv_cache, a.kr_cache, a.weight_uk, a.weight_uv, mask
    rest = a.sinks, a.block_table, a.kv_scales, a.kr_scales
    return mla_attention.Arguments(*operands, None, *rest, scale=a.scale)


def check(a: Arguments) -> None:
    sparse_latent_attention.refuse_fractals(a.kv_cache)
    sizes = check_operands(a, "B, S, N, D", "indices")
    check_letters(a, sizes, weight_uk="N, D, Hckv", weight_uv="N, Dv, Hckv")
    sparse_latent_attention.check_indices(a, sizes)
    check_mask(a.mask, a.context_lens, False, None, sizes)
    check_letters(a, sizes, sinks="N")


def fake(a: Arguments) -> Tensor:
    return a.q_nope.new_empty(*a.q_nope.shape[:3], a.weight_uv.shape[1])


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """The samples of sparse_latent_attention, with other queries and weights."""
    q_nope, q_rope, _, _, *weights, _ = mla_attention.sample(dtype, 0)
    for sample in sparse_latent_attention.samples(dtype):
        query, query_rope, kv_cache, kr_cache, *rest = sample.args
        rope = None if query_rope is None else q_rope[:, : query.shape[1]]
        operands = q_nope[:, : query.shape[1]], rope, kv_cache, kr_cache, *weights, *rest
        yield Sample(sample.mode, operands, sample.kwargs)


operator = define(
    "sparse_mla_attention", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples, kernel=kernel
)
