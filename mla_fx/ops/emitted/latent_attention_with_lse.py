"""latent_attention.with_lse: latent_attention, and the logarithms of its sums, by which parts are merged."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.define import Operator, Sample, define
from mla_fx.ops.common.math import accumulation_dtype

from . import latent_attention
from .attention import logits
from .chosen_rows import over_rows
from .codes import dtype_of
from .latent_attention import Arguments


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """The attention of `latent_attention` without sinks, and the logarithm of what each row is divided by::

        s   = (query . kv_cache + query_rope . kr_cache) * scale + mask
        out = softmax(s) . kv_cache
        lse = log(sum(exp(s)))

    Attention over parts of a context, each with its lse, is merged to attention over the whole::

        lse = logsumexp(lses);  out = sum(exp(lses - lse) * outs)

    query, query_rope, kv_cache, kr_cache, scale, the masks (mask, context_lens, is_causal, fill), block_table,
    kv_scales, kr_scales and indices are those of `latent_attention`, and mean the same; sinks must be None. lse is
    [B, S, N] in float32, or float64 for float64, its logarithm is the natural one, and it is minus infinity for a row
    whose scores all are. Such a row gives zeros, so it adds nothing to others.

    Returns out [B, S, N, Hckv] and lse. Raises ValueError for arguments that do not fit. Inference only.
    """
    if a.indices is not None:
        return of_queries(body(over_rows(a)), a.query)
    a = latent_attention.in_numbers(a)
    scores = logits(*latent_attention.scores(a), a.scale, a.fill, rows_first=True)
    weights, lse = weights_and_sums(scores, dtype_of(a))
    return latent_attention.weighted(weights, a), lse


def of_queries(results: tuple[Tensor, Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """What was computed for each query token as a sequence, for the sequences that these are of."""
    out, lse = results
    return out.view(query.shape), lse.view(query.shape[:3])


def weights_and_sums(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The probabilities of scores [..., T], rounded to `dtype`, and the logarithms of what they are divided by."""
    weights = torch.ops.aten._safe_softmax.default(scores, -1, scores.dtype)
    return weights.to(dtype), scores.logsumexp(-1)


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return latent_attention.fake(a), fake_sums(a.query)


def fake_sums(query: Tensor) -> Tensor:
    """The logarithms of queries [B, S, N, ...]."""
    return query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))


def define_with_lse(name: str, base: ModuleType, **functions: Any) -> Operator:
    """Register the overload of `base` that returns the logarithms, too. It takes no sinks."""

    def check(a: Any) -> None:
        if a.sinks is not None:
            what = "a sum with a sink is not what other parts are merged by"
            raise ValueError(f"sinks are given; they must be None: {what}.")
        base.check(a)

    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        return (sample for sample in base.samples(dtype) if "sinks" not in sample.mode)

    returns = ("out", "lse")
    return define(f"{name}.with_lse", base.Arguments, returns=returns, check=check, samples=samples, **functions)


operator = define_with_lse("latent_attention", latent_attention, body=body, fake=fake)
