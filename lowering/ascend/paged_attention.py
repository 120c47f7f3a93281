"""paged_attention as FusedInferAttentionScore, in its base scenario.

ATB's own operators in torch_npu have neither a converter to GE nor a fake kernel: no graph can hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from mla_fx.ops.common.stays import Stays, unless
from mla_fx.ops.vendor.paged_attention.arguments import Arguments
from mla_fx.ops.vendor.paged_attention.options import (
    BSND,
    DECODING,
    PLAIN_SCALE,
    UNCOMPRESSED,
    UNMASKED,
    UNQUANTIZED,
    read_options,
)
from mla_fx.target import Compiled

from . import limits
from .fused_infer_attention_score import KERNEL, attend_to_pages, chip_refusals
from .surface import Surface

OPERATOR = "paged_attention"
NO_GRAPH = f"torch.ops.atb._npu_paged_attention has no fake kernel, and {KERNEL}, which has one, takes"

# For each enumerator its value in the base scenario.
BASE = {
    "mask_type": UNMASKED,
    "quant_type": UNQUANTIZED,
    "compress_type": UNCOMPRESSED,
    "calc_type": DECODING,
    "scale_type": PLAIN_SCALE,
    "input_layout": BSND,
}
HEAD_SIZES = tuple(range(16, 257, 16))


def lower(surface: Surface, *args: Any, **kwargs: Any) -> Compiled | Stays:
    return unless(next(refusals(surface, Arguments(*args, **kwargs)), None), plain)


def refusals(surface: Surface, a: Arguments) -> Iterator[str]:
    yield from scenario(a)
    yield from chip_refusals(surface)
    yield from limits.dtype("query", a.query, KERNEL, limits.HALVES)
    yield from sizes(a)
    yield from lengths(a)
    for name in ("key_cache", "value_cache"):
        yield from limits.dense(name, getattr(a, name), KERNEL)


def scenario(a: Arguments) -> Iterator[str]:
    options = read_options(a)
    chosen = (options.mask, options.quant, options.compress, options.calc, options.scale, options.layout)
    for (name, wanted), value in zip(BASE.items(), chosen, strict=True):
        if value != wanted:
            yield f"{name} is {value!r}; {NO_GRAPH} {wanted!r}"
    if options.nz:
        yield f"the caches are NZ; {NO_GRAPH} plain ones here"
    if a.value_cache is None:
        yield f"value_cache is None; {NO_GRAPH} keys and values in two caches"
    if a.q_scale not in (0.0, 1.0):
        yield f"q_scale is {a.q_scale}; {NO_GRAPH} no scale of the query"


def lengths(a: Arguments) -> Iterator[str]:
    """A sequence without a context takes no row of query, but one of the kernel's."""
    given: object = a.context_lens
    if isinstance(given, Tensor):
        yield f"context_lens is a tensor, which may hold 0; {NO_GRAPH} a context for each row of query"
    elif not limits.holds(a.query.shape[0] == len(a.context_lens)):
        yield f"query has {a.query.shape[0]} rows and context_lens {len(a.context_lens)}; {NO_GRAPH} equally many"
    elif not all(limits.holds(length > 0) for length in a.context_lens):
        yield f"context_lens is {given}, which may hold 0; {NO_GRAPH} a context for each row of query"


def sizes(a: Arguments) -> Iterator[str]:
    assert a.value_cache is not None, "a combined cache was refused"
    heads, kv_heads = a.query.shape[1], a.key_cache.shape[2]
    yield from limits.size("query has D", a.query.shape[2], KERNEL, HEAD_SIZES)
    yield from limits.size("value_cache has Dv", a.value_cache.shape[3], KERNEL, (a.query.shape[2],))
    yield from limits.page_size("key_cache", a.key_cache.shape[1], KERNEL, 16, 512)
    if not limits.holds(heads <= 64 * kv_heads):
        yield f"query has {heads} heads and key_cache {kv_heads}; {KERNEL} takes up to 64 for each of key_cache"


def plain(*args: Any, **kwargs: Any) -> Tensor:
    a = Arguments(*args, **kwargs)
    assert a.value_cache is not None, "a combined cache was refused"
    return attend_to_pages(
        a.query,
        a.key_cache.flatten(2),
        a.value_cache.flatten(2),
        a.block_tables,
        a.context_lens,
        softmax_scale=a.qk_scale,
        block_size=a.key_cache.shape[1],
        num_key_value_heads=a.key_cache.shape[2],
    )
