"""mla_attention.with_lse: mla_attention, and the logarithms of its sums, by which parts are merged."""

from collections.abc import Callable

import torch
from torch import Tensor

from mla_fx.ops.common.absorption import expand_output
from mla_fx.ops.common.math import wide_product

from . import latent_attention, latent_attention_with_lse, mla_attention
from .attention import as_mask, logits
from .latent_attention_with_lse import define_with_lse, fake_sums, weights_and_sums
from .mla_attention import Arguments, in_latent_space, is_absorbed, joined
from .packed_sequences import sequences
from .pages import unpaged
from .tiled_attention import mask_of_rows, row_tiles

Attend = Callable[[latent_attention.Arguments], tuple[Tensor, Tensor]]


def body(a: Arguments) -> tuple[Tensor, Tensor]:
    """The attention of `mla_attention` without sinks, and the logarithm of what each row is divided by::

        s   = (q_nope . k_nope + q_rope . kr_cache) * scale + mask
        out = softmax(s) . v
        lse = log(sum(exp(s)))

    q_nope, q_rope, kv_cache, kr_cache, weight_uk, weight_uv, scale, the masks (mask, context_lens, is_causal, fill),
    block_table, kv_scales, kr_scales, indices, lens and max_absorbed_tokens are those of `mla_attention`, and mean the
    same; sinks must be None. lse is that of `latent_attention.with_lse`: [B, S, N] in float32, or float64 for float64,
    and minus infinity for a row whose scores all are. Such a row gives zeros.

    Returns out [B, S, N, Dv] and lse. Raises ValueError for arguments that do not fit. Inference only. Tracing this
    function with a symbolic S guards on the comparison with max_absorbed_tokens.
    """
    if a.lens is not None:
        return one_by_one(a, expanded)
    return absorbed(a) if a.indices is not None or is_absorbed(a) else expanded(a)


def kernel(a: Arguments) -> tuple[Tensor, Tensor]:
    """The same in memory that does not grow with S * T."""
    if a.lens is not None:
        return one_by_one(a, kernel)
    return absorbed(a) if a.indices is not None or is_absorbed(a) else tiled(a)


def one_by_one(a: Arguments, attend: Callable[[Arguments], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Packed sequences by attention of one."""
    out, lse = (torch.cat(part, 1) for part in zip(*map(attend, sequences(a)), strict=True))
    return out, lse


def absorbed(a: Arguments, attend: Attend = latent_attention_with_lse.body) -> tuple[Tensor, Tensor]:
    latent, lse = attend(in_latent_space(a))
    return expand_output(latent, a.weight_uv), lse


def expanded(a: Arguments) -> tuple[Tensor, Tensor]:
    scores, value = mla_attention.operands(a)
    return _of_rows(weighted(logits(*scores, a.scale, a.fill, rows_first=False), value))


def tiled(a: Arguments) -> tuple[Tensor, Tensor]:
    a = unpaged(a)
    query, key, value = joined(a, None)
    mask = as_mask(a.mask, a.context_lens, a.is_causal, a.q_nope, key.shape[2])
    parts = []
    for first, last in row_tiles(a.q_nope, key.shape[2]):
        scores = wide_product(query[:, :, first:last], key.mT)
        seen = mask_of_rows(mask, first, last)
        parts.append(weighted(logits(scores, None, seen, a.scale, a.fill, rows_first=False), value))
    out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
    return _of_rows((out, lse))


def weighted(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N, S, Dv] and [B, N, S]."""
    weights, lse = weights_and_sums(scores, value.dtype)
    return weights @ value, lse


def _of_rows(parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = (part.transpose(1, 2).contiguous() for part in parts)
    return out, lse


def fake(a: Arguments) -> tuple[Tensor, Tensor]:
    return mla_attention.fake(a), fake_sums(a.q_nope)


operator = define_with_lse("mla_attention", mla_attention, body=body, fake=fake, kernel=kernel)
