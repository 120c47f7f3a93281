"""latent_attention.with_lse: latent_attention, and the logarithms of its sums, by which parts are merged."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.math import accumulation_dtype

from . import latent_attention
from .attention import logits
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
    kv_scales and kr_scales are those of `latent_attention`, and mean the same; sinks must be None. lse is [B, S, N] in
    float32, or float64 for float64, its logarithm is the natural one, and it is minus infinity for a row whose scores
    all are. Such a row gives zeros, so it adds nothing to others.

    Returns out [B, S, N, Hckv] and lse. Raises ValueError for arguments that do not fit. Inference only.
    """
    a = latent_attention.in_numbers(a)
    scores = logits(*latent_attention.scores(a), a.scale, a.fill, rows_first=True)
    weights, lse = weights_and_sums(scores, dtype_of(a))
    return latent_attention.weighted(weights, a), lse


def weights_and_sums(scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The probabilities of scores [..., T], rounded to `dtype`, and the logarithms of what they are divided by."""
    weights = torch.ops.aten._safe_softmax.default(scores, -1, scores.dtype)
    return weights.to(dtype), scores.logsumexp(-1)


def check(a: Arguments) -> None:
    refuse_sinks(a.sinks)
    latent_attention.check(a)


def refuse_sinks(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise ValueError("sinks are given; they must be None: a sum with a sink is not what other parts are merged by.")


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return latent_attention.fake(a), fake_sums(a.query)


def fake_sums(query: Tensor) -> Tensor:
    """The logarithms of queries [B, S, N, ...]."""
    return query.new_empty(query.shape[:3], dtype=accumulation_dtype(query.dtype))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the samples of latent_attention that have no sinks."""
    return without_sinks(latent_attention.samples(dtype))


def without_sinks(samples: Iterable[Sample]) -> Iterator[Sample]:
    return (sample for sample in samples if "sinks" not in sample.mode)


operator = define(
    "latent_attention.with_lse", Arguments, body, returns=("out", "lse"), check=check, fake=fake, samples=samples
)
