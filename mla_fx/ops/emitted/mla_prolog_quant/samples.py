"""Calls of mla_prolog_quant: every quantisation, and none."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cast import i8_trunc, quantize_rows
from mla_fx.ops.common.define import Sample
from mla_fx.ops.common.sample import Sampler

from .arguments import KEY_TILES


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every quantisation of query and tokens, none at all, and skipped tokens."""
    yield Sample("quantised", *sample(dtype, 0))
    yield Sample("quantised", *sample(dtype, 1, skip=2, epsilon_cq=0.1))
    yield Sample("quantised, smooth", *sample(dtype, 2, smooth=(24,)))
    yield Sample("quantised, smooth", *sample(dtype, 3, smooth=(1, 24), tokens=1, epsilon_ckv=0.1))
    yield Sample("quantised, asymmetric", *sample(dtype, 4, is_symmetry=False))
    yield Sample("quantised, asymmetric, smooth", *sample(dtype, 5, smooth=(24,), skip=1, is_symmetry=False))
    yield Sample("unquantised", *sample(dtype, 6, quantised=False))
    yield Sample("unquantised", *sample(dtype, 7, quantised=False, skip=2, epsilon_cq=0.1, epsilon_ckv=0.1))
    yield Sample("int8 tokens", *sample(dtype, 8, int8_tokens=True))
    yield Sample("int8 tokens", *sample(dtype, 9, int8_tokens=True, smooth=(24,), is_symmetry=False, skip=1))
    yield Sample("int8 tokens, unquantised", *sample(dtype, 10, int8_tokens=True, quantised=False, epsilon_cq=0.1))


def sample(
    dtype: torch.dtype,
    seed: int,
    *,
    tokens: int = 6,
    skip: int = 0,
    smooth: tuple[int, ...] | None = None,
    quantised: bool = True,
    int8_tokens: bool = False,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`smooth` is the shape of smooth_scales_cq. `quantised` and `int8_tokens` say whether the query and token_x are
    int8."""
    hidden, compressed, heads, nope, rank, width = 32, 24, 3, 8, 16, 4
    blocks, block_size = 3, 5
    columns = heads * (nope + width)
    draw = Sampler(dtype, seed)
    w_uq_qr, dequant_scale = draw.weight(compressed, columns, fan_in=compressed), torch.empty(0, 1)
    kv_cache = draw.normal(blocks, block_size, 1, rank)
    if quantised:
        w_uq_qr, scale = quantised_columns(w_uq_qr)
        dequant_scale, kv_cache = scale.mT, i8_trunc(40 * kv_cache)
    token_x, w_dq = draw.normal(tokens, hidden), draw.weight(hidden, compressed, fan_in=hidden)
    w_uk, w_dkv_kr = draw.weight(heads, nope, rank, fan_in=nope), draw.weight(rank + width, hidden, fan_in=hidden).mT
    token_scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if int8_tokens:
        w_dq, w_dq_scale = quantised_columns(w_dq)
        w_dkv_kr, w_dkv_kr_scale = quantised_columns(w_dkv_kr)
        token_scales = w_dq_scale, w_dkv_kr_scale
    arguments = (
        token_x,
        w_dq,
        w_uq_qr,
        dequant_scale,
        w_uk,
        w_dkv_kr,
        draw.gamma(compressed),
        draw.gamma(rank),
        *draw.tables(tokens, width),
        draw.slots(tokens, blocks * block_size, skip),
        kv_cache,
        draw.normal(blocks, block_size, 1, width),
        draw.normal(blocks, block_size, 1, KEY_TILES).float(),
        None if smooth is None else draw.gamma(compressed).float().view(smooth),
        *token_scales,
    )
    return arguments, options


def quantised_columns(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and the scale [1, columns] of each column."""
    codes, scale = quantize_rows(weight.mT.float(), inverse_first=False)
    return codes.mT.contiguous(), scale.mT
