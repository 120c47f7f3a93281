"""mla_prolog_quant: the prolog of DeepSeek-V3.2, with an int8 query path and int8 latents, 4 scales for each."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mla_fx.ops.common.cache import store, store_
from mla_fx.ops.common.cast import i8_trunc, int_matmul, quantize_rows
from mla_fx.ops.common.check import (
    check_devices,
    check_dtype,
    check_index,
    check_multiple,
    check_rank,
    check_shape,
    check_tensors,
)
from mla_fx.ops.common.define import Sample, define
from mla_fx.ops.common.math import check_rope, rope, to_accumulation_dtype
from mla_fx.ops.common.sample import Sampler

ROPE_LAYOUT = "interleave_half"
KEY_TILES = 4


def body(
    token_x: Tensor,
    w_dq: Tensor,
    w_uq_qr: Tensor,
    dequant_scale: Tensor,
    w_uk: Tensor,
    w_dkv_kr: Tensor,
    gamma_cq: Tensor,
    gamma_ckv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    k_scale_cache: Tensor,
    smooth_scales_cq: Tensor | None = None,
    *,
    epsilon_cq: float = 1e-5,
    epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    is_symmetry: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The absorbed query of MLA and its normalised int8 form, and the caches with this step's int8 latents::

        c                = r(token_x @ w_dq)
        q_norm, q_scale  = int8(RMSNorm(c, gamma_cq) * smooth_scales_cq)      one scale for each token
        u                = r((q_norm @ w_uq_qr) * q_scale * dequant_scale)    int32 sums
        query_nope       = r(u[nope of head n] @ w_uk[n])
        query_rope       = r(RoPE(u[rope of head n]))
        k                = r(token_x @ w_dkv_kr)
        latent, k_scale  = int8(RMSNorm(k[:Hckv], gamma_ckv))                 one for each token and quarter of Hckv
        key_rope         = r(RoPE(k[Hckv:]))
        kv_cache[cache_index] = latent;  k_scale_cache[cache_index] = k_scale;  kr_cache[cache_index] = key_rope

    `r` rounds to the dtype of token_x; what it does not round is float32, or float64 for float64. token_x @ w_dq is
    the sum of two products, over the first He // 2 columns of token_x and over the others.
    RMSNorm(x, gamma) = r(gamma * (x * (1 / sqrt(sum(x^2 * (1/n)) + epsilon)))), with epsilon_cq or epsilon_ckv.
    int8(x) takes f = 127 / max|x| and is (round(x * f), 1 / f); a row of zeros becomes zeros with scale 0. With
    is_symmetry False, that of the query takes s = max((max(x) - min(x)) / 255, 1e-12) and o = 127 - max(x) / s instead
    and is (round(x / s + o), s); then u = r(((q_norm - o) @ w_uq_qr) * s * dequant_scale), where the product with o is
    not rounded. Codes are rounded half to even and saturate; NaN becomes 0. RoPE reads pairs of neighbours and writes
    two halves.

    token_x is [T, He]; w_dq [He, Hcq]; w_uq_qr int8 [Hcq, N*(D+Dr)], for each head D nope then Dr rope columns;
    dequant_scale float32 [N*(D+Dr), 1], the scales of these columns; w_uk [N, D, Hckv]; w_dkv_kr [He, Hckv+Dr];
    gamma_cq [Hcq]; gamma_ckv [Hckv]; cos and sin [T, Dr]; smooth_scales_cq float32 [Hcq] or [1, Hcq], or None for ones;
    cache_index int64 [T] over the BlockNum*BlockSize slots. Caches: kv_cache int8 [BlockNum, BlockSize, 1, Hckv],
    kr_cache [BlockNum, BlockSize, 1, Dr] and k_scale_cache float32 [BlockNum, BlockSize, 1, 4]. Sizes are free, with
    Hckv divisible by 4 and Dr even. Tensors of no dtype named here share that of token_x (bfloat16 as in the source,
    float16, float32, float64), but gammas and tables may be any of these. Strides are free: NZ, of which the source
    speaks, is how an NPU stores weights. A negative index stores nothing for its token. Equal non-negative indices
    leave either row.

    A dequant_scale with shape[0] == 0 quantises nothing: w_uq_qr and kv_cache have the dtype of token_x, q_norm is
    RMSNorm(c, gamma_cq), u = r(q_norm @ w_uq_qr), and kv_cache takes RMSNorm(k[:Hckv], gamma_ckv). k_scale_cache stays
    as it is, smooth_scales_cq must be None and is_symmetry True.

    Returns q_norm_out [T, Hcq] and q_norm_scale_out float32 [T, 1], which the indexer reads, query_nope_out
    [T, N, Hckv], query_rope_out [T, N, Dr], kv_cache_out, kr_cache_out and k_scale_cache_out. If nothing is quantised,
    q_norm_out has the dtype of token_x and q_norm_scale_out is empty, [0]. With is_symmetry False, q_norm_scale_out is
    s; the offset o is not returned, as in the source. The twin `mla_prolog_quant_` writes the caches instead and
    returns the first four. Raises ValueError for arguments that do not fit. Inference only.

    Source: `mla_prolog_quant_d` and `mla_prolog_quant_p` of pypto's DeepSeek-V3.2, whose maths is one; their docstrings
    are swapped, d decodes and p prefills. Their tile_config and rope_cfg only steer tiling and mean nothing here. Where
    they disagree with themselves: k_scale_cache is float32 as in the code, not float16 as in the docstrings. cache_mode
    must be "PA_BSND": "PA_NZ" is documented, but no code writes it. smooth_scales_cq and is_symmetry do what the
    docstring of quant() says, though nothing sets them and the code for asymmetry uses neither scale nor offset. Key
    scales belong to a token and tile, not to a channel. Their test script omits epsilon and divides by the root; here
    the code counts. The rope part of u is rounded before it is rotated, unlike in npu_mla_prolog_v3.
    """
    arguments = SimpleNamespace(**locals())
    latent, key_rope, k_scale = key_rows(arguments)
    return (
        *queries(arguments),
        store(kv_cache, cache_index, latent, cache_mode),
        store(kr_cache, cache_index, key_rope, cache_mode),
        k_scale_cache.clone() if k_scale is None else store(k_scale_cache, cache_index, k_scale, cache_mode),
    )


def body_(**arguments: Any) -> tuple[Tensor, ...]:
    a = SimpleNamespace(**arguments)
    results = queries(a)
    for cache, rows in zip((a.kv_cache, a.kr_cache, a.k_scale_cache), key_rows(a), strict=True):
        if rows is not None:
            store_(cache, a.cache_index, rows, a.cache_mode)
    return results


def is_quantised(dequant_scale: Tensor) -> bool:
    return dequant_scale.dim() == 0 or not statically_known_true(dequant_scale.shape[0] == 0)


def queries(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_norm_out, q_norm_scale_out, query_nope_out, query_rope_out."""
    half = a.token_x.shape[1] // 2
    x, w_dq = to_accumulation_dtype(a.token_x), to_accumulation_dtype(a.w_dq)
    compressed = (x[:, :half] @ w_dq[:half] + x[:, half:] @ w_dq[half:]).to(a.token_x.dtype)
    q_norm = rms_norm(compressed, a.gamma_cq, a.epsilon_cq)
    if is_quantised(a.dequant_scale):
        q_norm, q_norm_scale, up = quantised_projection(q_norm, a)
    else:
        q_norm_scale, up = a.dequant_scale.new_empty(0), q_norm @ a.w_uq_qr
    heads, nope, _ = a.w_uk.shape
    up = up.view(up.shape[0], heads, a.w_uq_qr.shape[1] // heads)
    query_nope = torch.bmm(up[..., :nope].transpose(0, 1), a.w_uk).transpose(0, 1)
    query_rope = rope(up[..., nope:], a.cos.unsqueeze(1), a.sin.unsqueeze(1), ROPE_LAYOUT)
    return q_norm, q_norm_scale, query_nope.clone(memory_format=torch.contiguous_format), query_rope


def quantised_projection(q_norm: Tensor, a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """q_norm in int8, its scale, and its product with w_uq_qr in the dtype that it had."""
    z = to_accumulation_dtype(q_norm)
    if a.smooth_scales_cq is not None:
        z = z * a.smooth_scales_cq
    if a.is_symmetry:
        codes, scale = quantize_rows(z, inverse_first=True)
        product = int_matmul(codes, a.w_uq_qr)
    else:
        codes, scale, offset = quantize_rows_with_offset(z)
        # In float64, because what is left after the offset can be far smaller than either.
        product = ((codes.double() - offset.double()) @ a.w_uq_qr.double()).to(z.dtype)
    up = (product * scale * a.dequant_scale.flatten()).to(q_norm.dtype)
    return codes, scale.float(), up


def quantize_rows_with_offset(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 over the last axis, scale and offset [..., 1], such that `(int8 - offset) * scale` is about `x`."""
    largest, smallest = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    # As a tensor: on CUDA, PyTorch divides by a number with one rounding too many.
    scale = ((largest - smallest) / torch.full_like(largest, 255.0)).clamp(min=1e-12)
    offset = 127.0 - largest / scale
    return i8_trunc(x / scale + offset), scale, offset


def key_rows(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor | None]:
    """What one row of kv_cache, kr_cache and k_scale_cache becomes for each token; None where nothing is quantised."""
    kv = a.token_x @ a.w_dkv_kr
    rank = a.gamma_ckv.shape[0]
    latent = rms_norm(kv[:, :rank], a.gamma_ckv, a.epsilon_ckv)
    key_rope = rope(kv[:, rank:], a.cos, a.sin, ROPE_LAYOUT)
    if not is_quantised(a.dequant_scale):
        return latent, key_rope, None
    tiles = to_accumulation_dtype(latent).view(latent.shape[0], KEY_TILES, rank // KEY_TILES)
    codes, scale = quantize_rows(tiles, inverse_first=True)
    return codes.flatten(1), key_rope, scale.squeeze(-1).float()


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Takes the mean's factor before the sum and multiplies by the reciprocal root, unlike the other operators'."""
    z = to_accumulation_dtype(x)
    mean = (z * z * (1.0 / x.shape[-1])).sum(-1, keepdim=True)
    # By way of float64: the float32 square roots of PyTorch on a CPU are not all correctly rounded.
    root = (mean + epsilon).double().sqrt().to(z.dtype)
    return (gamma.to(z.dtype) * (z * root.reciprocal())).to(x.dtype)


def check(**arguments: Any) -> None:
    a = SimpleNamespace(**arguments)
    if a.cache_mode != "PA_BSND":
        raise ValueError(f"cache_mode is {a.cache_mode!r}; it must be 'PA_BSND', the only layout that is ever written.")
    check_dtypes(arguments)
    check_rank("token_x", a.token_x, "T, He")
    check_rank("w_uk", a.w_uk, "N, D, Hckv")
    tokens, hidden = a.token_x.shape
    heads, nope, rank = a.w_uk.shape
    check_multiple("Hckv, the last axis of w_uk,", rank, KEY_TILES, f"a positive multiple of {KEY_TILES}")
    check_shape("w_dkv_kr", a.w_dkv_kr, "He, Hckv+Dr", (hidden, None))
    width = a.w_dkv_kr.shape[1] - rank
    check_rope(width, ROPE_LAYOUT, "T, Dr", (tokens, width), cos=a.cos, sin=a.sin)
    check_shape("w_dq", a.w_dq, "He, Hcq", (hidden, None))
    compressed = a.w_dq.shape[1]
    check_multiple("Hcq, the last axis of w_dq,", compressed, 1, "1 or more")
    check_shape("gamma_cq", a.gamma_cq, "Hcq", (compressed,))
    check_shape("gamma_ckv", a.gamma_ckv, "Hckv", (rank,))
    check_shape("w_uq_qr", a.w_uq_qr, "Hcq, N*(D+Dr)", (compressed, heads * (nope + width)))
    check_quantisation(a)
    check_shape("kv_cache", a.kv_cache, "BlockNum, BlockSize, 1, Hckv", (None, None, 1, rank))
    blocks, block_size = a.kv_cache.shape[:2]
    check_shape("kr_cache", a.kr_cache, "BlockNum, BlockSize, 1, Dr", (blocks, block_size, 1, width))
    check_shape("k_scale_cache", a.k_scale_cache, "BlockNum, BlockSize, 1, 4", (blocks, block_size, 1, KEY_TILES))
    check_shape("cache_index", a.cache_index, "T", (tokens,))
    check_index("cache_index", a.cache_index, blocks * block_size)


def check_dtypes(arguments: Mapping[str, Any]) -> None:
    token_x, dequant_scale = arguments["token_x"], arguments["dequant_scale"]
    quantised = is_quantised(dequant_scale)
    codes = torch.int8 if quantised else token_x.dtype
    scales = dict.fromkeys(("dequant_scale", "k_scale_cache", "smooth_scales_cq"), torch.float32)
    own = {"w_uq_qr": codes, "kv_cache": codes, "cache_index": torch.int64, **scales}
    floats = {name: value for name, value in arguments.items() if name not in own}
    check_devices(arguments)
    check_tensors(floats, free=("gamma_cq", "gamma_ckv", "cos", "sin"))
    for name, dtype in own.items():
        tensor = arguments[name]
        if tensor is None:
            continue
        if tensor.dtype == torch.int8 and not quantised:
            shape = list(dequant_scale.shape)
            raise ValueError(f"dequant_scale has shape {shape}; with {name} in int8 it must be [N*(D+Dr), 1].")
        check_dtype(name, tensor, (dtype,))


def check_quantisation(a: SimpleNamespace) -> None:
    columns, compressed = a.w_uq_qr.shape[1], a.w_dq.shape[1]
    if is_quantised(a.dequant_scale):
        check_shape("dequant_scale", a.dequant_scale, "N*(D+Dr), 1", (columns, 1))
        if a.smooth_scales_cq is not None:
            lead = (1,) * (a.smooth_scales_cq.dim() - 1)
            check_rank("smooth_scales_cq", a.smooth_scales_cq, "Hcq or 1, Hcq")
            check_shape("smooth_scales_cq", a.smooth_scales_cq, "1, Hcq" if lead else "Hcq", (*lead, compressed))
        return
    if a.smooth_scales_cq is not None:
        raise ValueError("smooth_scales_cq is given; it must be None with an empty dequant_scale.")
    if not a.is_symmetry:
        raise ValueError("is_symmetry is False; it must be True with an empty dequant_scale.")


def fake(**arguments: Any) -> tuple[Tensor, ...]:
    a = SimpleNamespace(**arguments)
    tokens = a.token_x.shape[0]
    heads, _, rank = a.w_uk.shape
    return (
        a.w_uq_qr.new_empty(tokens, a.w_dq.shape[1]),
        a.dequant_scale.new_empty((tokens, 1) if is_quantised(a.dequant_scale) else (0,)),
        a.token_x.new_empty(tokens, heads, rank),
        a.token_x.new_empty(tokens, heads, a.kr_cache.shape[-1]),
        *(torch.empty_like(cache) for cache in (a.kv_cache, a.kr_cache, a.k_scale_cache)),
    )


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every quantisation of the query, none at all, and skipped tokens."""
    yield Sample("quantised", *sample(dtype, 0))
    yield Sample("quantised", *sample(dtype, 1, skip=2, epsilon_cq=0.1))
    yield Sample("quantised, smooth", *sample(dtype, 2, smooth=(24,)))
    yield Sample("quantised, smooth", *sample(dtype, 3, smooth=(1, 24), tokens=1, epsilon_ckv=0.1))
    yield Sample("quantised, asymmetric", *sample(dtype, 4, is_symmetry=False))
    yield Sample("quantised, asymmetric, smooth", *sample(dtype, 5, smooth=(24,), skip=1, is_symmetry=False))
    yield Sample("unquantised", *sample(dtype, 6, quantised=False))
    yield Sample("unquantised", *sample(dtype, 7, quantised=False, skip=2, epsilon_cq=0.1, epsilon_ckv=0.1))


def sample(
    dtype: torch.dtype,
    seed: int,
    *,
    tokens: int = 6,
    skip: int = 0,
    smooth: tuple[int, ...] | None = None,
    quantised: bool = True,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`smooth` is the shape of smooth_scales_cq."""
    hidden, compressed, heads, nope, rank, width = 32, 24, 3, 8, 16, 4
    blocks, block_size = 3, 5
    columns = heads * (nope + width)
    draw = Sampler(dtype, seed)
    w_uq_qr, dequant_scale = draw.weight(compressed, columns, fan_in=compressed), torch.empty(0, 1)
    kv_cache = draw.normal(blocks, block_size, 1, rank)
    if quantised:
        codes, scale = quantize_rows(w_uq_qr.mT.float(), inverse_first=False)
        w_uq_qr, dequant_scale, kv_cache = codes.mT.contiguous(), scale, i8_trunc(40 * kv_cache)
    arguments = (
        draw.normal(tokens, hidden),
        draw.weight(hidden, compressed, fan_in=hidden),
        w_uq_qr,
        dequant_scale,
        draw.weight(heads, nope, rank, fan_in=nope),
        draw.weight(rank + width, hidden, fan_in=hidden).mT,
        draw.gamma(compressed),
        draw.gamma(rank),
        *draw.tables(tokens, width),
        draw.slots(tokens, blocks * block_size, skip),
        kv_cache,
        draw.normal(blocks, block_size, 1, width),
        draw.normal(blocks, block_size, 1, KEY_TILES).float(),
        None if smooth is None else draw.gamma(compressed).float().view(smooth),
    )
    return arguments, options


operator = define(
    "mla_prolog_quant",
    body,
    returns=(
        "q_norm_out",
        "q_norm_scale_out",
        "query_nope_out",
        "query_rope_out",
        "kv_cache_out",
        "kr_cache_out",
        "k_scale_cache_out",
    ),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={name + "_out": name for name in ("kv_cache", "kr_cache", "k_scale_cache")},
    traceable=False,
)
