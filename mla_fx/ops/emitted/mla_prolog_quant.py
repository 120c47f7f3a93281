"""mla_prolog_quant: the prolog of DeepSeek-V3.2, with an int8 query path and int8 latents, 4 scales per row."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from mla_fx.ops.common.cache import store
from mla_fx.ops.common.cast import i8_trunc, int_matmul, quantize_rows
from mla_fx.ops.common.check import (
    Sizes,
    check_dtypes,
    check_index,
    check_letters,
    check_multiple,
    check_optional,
    check_tensors,
    scale_dtypes,
)
from mla_fx.ops.common.define import Given, Sample, define
from mla_fx.ops.common.math import check_rope, rope, to_accumulation_dtype
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.common.sizes import statically_known_true

ROPE_LAYOUT = "interleave_half"
KEY_TILES = 4
CACHES = ("kv_cache", "kr_cache", "k_scale_cache")
SCALE_NAMES = ("dequant_scale", "k_scale_cache", "smooth_scales_cq", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")
RESULTS = ("q_norm_out", "q_norm_scale_out", "query_nope_out", "query_rope_out")

Queries = tuple[Tensor, Tensor, Tensor, Tensor]
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Arguments:
    token_x: Tensor
    w_dq: Tensor
    w_uq_qr: Tensor
    dequant_scale: Tensor
    w_uk: Tensor
    w_dkv_kr: Tensor
    gamma_cq: Tensor
    gamma_ckv: Tensor
    cos: Tensor
    sin: Tensor
    cache_index: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    k_scale_cache: Tensor
    smooth_scales_cq: Tensor | None = None
    dequant_scale_w_dq: Tensor | None = None
    dequant_scale_w_dkv_kr: Tensor | None = None
    _: KW_ONLY
    epsilon_cq: float = 1e-5
    epsilon_ckv: float = 1e-5
    cache_mode: str = "PA_BSND"
    is_symmetry: bool = True

    @property
    def quantises_query(self) -> bool:
        """Whether the normalised query is quantised to int8; the key cache is int8, too, then."""
        return self.dequant_scale.dim() == 0 or not statically_known_true(self.dequant_scale.shape[0] == 0)


def body(a: Arguments) -> Results:
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
    not rounded. Codes are rounded half to even and saturate; NaN becomes 0. RoPE reads interleaved pairs and writes
    two halves.

    With int8 w_dq and w_dkv_kr, token_x is made int8 with one scale for each token, and token_x @ w_dq is one product::

        x, x_scale = int8(token_x)
        c          = r((x @ w_dq) * x_scale * dequant_scale_w_dq)             int32 sums
        k          = r((x @ w_dkv_kr) * x_scale * dequant_scale_w_dkv_kr)

    token_x is [T, He]; w_dq [He, Hcq]; w_uq_qr int8 [Hcq, N*(D+Dr)], for each head D nope then Dr rope columns;
    dequant_scale float32 [N*(D+Dr), 1], the scales of these columns; w_uk [N, D, Hckv]; w_dkv_kr [He, Hckv+Dr];
    gamma_cq [Hcq]; gamma_ckv [Hckv]; cos and sin [T, Dr]; smooth_scales_cq float32 [Hcq] or [1, Hcq], or None for ones;
    dequant_scale_w_dq float32 [1, Hcq] and dequant_scale_w_dkv_kr float32 [1, Hckv+Dr], both with int8 w_dq and
    w_dkv_kr and None otherwise; cache_index int64 [T] over the BlockNum*BlockSize slots. Caches: kv_cache int8
    [BlockNum, BlockSize, 1, Hckv], kr_cache [BlockNum, BlockSize, 1, Dr] and k_scale_cache float32 [BlockNum,
    BlockSize, 1, 4]. Sizes are free, with Hckv divisible by 4 and Dr even. Tensors of no dtype named here share that of
    token_x (bfloat16 as in the source, float16, float32, float64), but gammas and tables may be any of these, and with
    float64 tokens scales may be float64, too. Strides are free: the source's NZ is how an NPU stores weights. A
    negative index stores nothing for its token. Duplicate slots: which row is stored is undefined.

    A dequant_scale with shape[0] == 0 quantises neither query nor key: w_uq_qr and kv_cache have the dtype of token_x,
    q_norm is RMSNorm(c, gamma_cq), u = r(q_norm @ w_uq_qr), and kv_cache takes RMSNorm(k[:Hckv], gamma_ckv).
    k_scale_cache stays as it is, smooth_scales_cq must be None and is_symmetry True.

    Returns q_norm_out [T, Hcq] and q_norm_scale_out float32 [T, 1], which the indexer reads, query_nope_out
    [T, N, Hckv], query_rope_out [T, N, Dr], kv_cache_out, kr_cache_out, k_scale_cache_out. With an empty dequant_scale,
    q_norm_out has the dtype of token_x and q_norm_scale_out is empty, [0]. With is_symmetry False, q_norm_scale_out is
    s; the offset o is not returned, as in the source. In place, `mla_prolog_quant_` writes the caches instead and
    returns the first four. Raises ValueError for arguments that do not fit. Inference only.

    Source: `mla_prolog_quant_d` and `mla_prolog_quant_p` of pypto's DeepSeek-V3.2, which compute the same; their
    docstrings are swapped: d decodes and p prefills. Their tile_config and rope_cfg only steer tiling and mean nothing
    here. Where they contradict themselves: k_scale_cache is float32 as in the code, not float16 as in the docstrings.
    cache_mode must be "PA_BSND": "PA_NZ" is documented, but no code writes it. Nothing sets smooth_scales_cq,
    is_symmetry, dequant_scale_w_dq or dequant_scale_w_dkv_kr; here they do what quant() and pre_compute_2d() would do
    with them, but for is_symmetry, whose code uses neither scale nor offset, so that its docstring counts.
    dequant_scale_x is a field of the source that no code reads, for token_x comes unquantised; it is absent here. Key
    scales belong to a token and tile, not to a channel. Their test script omits epsilon and divides by the root; here
    the code counts. The rope part of u is rounded before it is rotated, unlike in npu_mla_prolog_v3.
    """
    compressed, keys = projected_tokens(a)
    latent, key_rope, k_scale = key_rows(a, keys)
    return (
        *queries(a, compressed),
        store(a.kv_cache, a.cache_index, latent, a.cache_mode),
        store(a.kr_cache, a.cache_index, key_rope, a.cache_mode),
        a.k_scale_cache.clone() if k_scale is None else store(a.k_scale_cache, a.cache_index, k_scale, a.cache_mode),
    )


def body_(a: Arguments) -> Queries:
    compressed, keys = projected_tokens(a)
    results = queries(a, compressed)
    for cache, rows in zip((a.kv_cache, a.kr_cache, a.k_scale_cache), key_rows(a, keys), strict=True):
        if rows is not None:
            store(cache, a.cache_index, rows, a.cache_mode, in_place=True)
    return results


def projected_tokens(a: Arguments) -> tuple[Tensor, Tensor]:
    """token_x @ w_dq and token_x @ w_dkv_kr, in the dtype of token_x."""
    x, dtype = to_accumulation_dtype(a.token_x), a.token_x.dtype
    if a.dequant_scale_w_dq is not None and a.dequant_scale_w_dkv_kr is not None:
        codes, scale = quantize_rows(x, inverse_first=True)
        compressed = int_matmul(codes, a.w_dq) * scale * a.dequant_scale_w_dq
        keys = int_matmul(codes, a.w_dkv_kr) * scale * a.dequant_scale_w_dkv_kr
        return compressed.to(dtype), keys.to(dtype)
    half, w_dq = x.shape[1] // 2, to_accumulation_dtype(a.w_dq)
    compressed = x[:, :half] @ w_dq[:half] + x[:, half:] @ w_dq[half:]
    return compressed.to(dtype), a.token_x @ a.w_dkv_kr


def queries(a: Arguments, compressed: Tensor) -> Queries:
    """q_norm_out, q_norm_scale_out, query_nope_out, query_rope_out."""
    q_norm = rms_norm(compressed, a.gamma_cq, a.epsilon_cq)
    if a.quantises_query:
        q_norm, q_norm_scale, up = quantised_projection(q_norm, a)
    else:
        q_norm_scale, up = a.dequant_scale.new_empty(0), q_norm @ a.w_uq_qr
    heads, nope, _ = a.w_uk.shape
    up = up.view(up.shape[0], heads, a.w_uq_qr.shape[1] // heads)
    query_nope = torch.bmm(up[..., :nope].transpose(0, 1), a.w_uk).transpose(0, 1)
    query_rope = rope(up[..., nope:], a.cos.unsqueeze(1), a.sin.unsqueeze(1), ROPE_LAYOUT)
    return q_norm, q_norm_scale, query_nope.clone(memory_format=torch.contiguous_format), query_rope


def quantised_projection(q_norm: Tensor, a: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """q_norm in int8, its scale, and its product with w_uq_qr in the dtype of q_norm."""
    z = to_accumulation_dtype(q_norm)
    if a.smooth_scales_cq is not None:
        z = z * a.smooth_scales_cq
    if a.is_symmetry:
        codes, scale = quantize_rows(z, inverse_first=True)
        product = int_matmul(codes, a.w_uq_qr)
    else:
        codes, scale, offset = quantize_rows_with_offset(z)
        # In float64, because the difference after subtracting the offset can be far smaller than either term.
        product = ((codes.double() - offset.double()) @ a.w_uq_qr.double()).to(z.dtype)
    up = (product * scale * a.dequant_scale.flatten()).to(q_norm.dtype)
    return codes, scale.to(a.dequant_scale.dtype), up


def quantize_rows_with_offset(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int8 over the last axis, scale and offset [..., 1], such that `(int8 - offset) * scale` is about `x`."""
    largest, smallest = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    # A tensor: on CUDA, PyTorch rounds once too often when it divides by a number.
    scale = ((largest - smallest) / torch.full_like(largest, 255.0)).clamp(min=1e-12)
    offset = 127.0 - largest / scale
    return i8_trunc(x / scale + offset), scale, offset


def key_rows(a: Arguments, keys: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows of kv_cache, kr_cache and k_scale_cache per token; without int8 latents there are no scales."""
    rank = a.gamma_ckv.shape[0]
    latent = rms_norm(keys[:, :rank], a.gamma_ckv, a.epsilon_ckv)
    key_rope = rope(keys[:, rank:], a.cos, a.sin, ROPE_LAYOUT)
    if not a.quantises_query:
        return latent, key_rope, None
    tiles = to_accumulation_dtype(latent).view(latent.shape[0], KEY_TILES, rank // KEY_TILES)
    codes, scale = quantize_rows(tiles, inverse_first=True)
    return codes.flatten(1), key_rope, scale.squeeze(-1).to(a.k_scale_cache.dtype)


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """RMSNorm as the source computes it: 1/n before the sum, and a multiplication by the reciprocal of the root.

    The other operators multiply by 1/n after the sum and divide by the root.
    """
    z = to_accumulation_dtype(x)
    mean = (z * z * (1.0 / x.shape[-1])).sum(-1, keepdim=True)
    # Via float64: PyTorch's float32 square roots on a CPU are not all correctly rounded.
    root = (mean + epsilon).double().sqrt().to(z.dtype)
    return (gamma.to(z.dtype) * (z * root.reciprocal())).to(x.dtype)


def fake(a: Arguments) -> Results:
    tokens = a.token_x.shape[0]
    heads, _, rank = a.w_uk.shape
    return (
        a.w_uq_qr.new_empty(tokens, a.w_dq.shape[1]),
        a.dequant_scale.new_empty((tokens, 1) if a.quantises_query else (0,)),
        a.token_x.new_empty(tokens, heads, rank),
        a.token_x.new_empty(tokens, heads, a.kr_cache.shape[-1]),
        torch.empty_like(a.kv_cache),
        torch.empty_like(a.kr_cache),
        torch.empty_like(a.k_scale_cache),
    )


# --- checks -----------------------------------------------------------------------------------------------------------


def check(a: Arguments) -> None:
    if a.cache_mode != "PA_BSND":
        raise ValueError(f"cache_mode is {a.cache_mode!r}; it must be 'PA_BSND', which the kernel always writes.")
    check_types(a)
    sizes: Sizes = {}
    check_letters(a, sizes, token_x="T, He", w_uk="N, D, Hckv")
    check_multiple("Hckv, the last axis of w_uk,", sizes["Hckv"], KEY_TILES, f"a positive multiple of {KEY_TILES}")
    check_letters(a, sizes, w_dkv_kr="He, Hckv+Dr")
    sizes["Dr"] = width = sizes["Hckv+Dr"] - sizes["Hckv"]
    check_rope(width, ROPE_LAYOUT, "T, Dr", (sizes["T"], width), cos=a.cos, sin=a.sin)
    check_letters(a, sizes, w_dq="He, Hcq")
    check_multiple("Hcq, the last axis of w_dq,", sizes["Hcq"], 1, "1 or more")
    sizes["N*(D+Dr)"] = sizes["N"] * (sizes["D"] + width)
    check_letters(a, sizes, gamma_cq="Hcq", gamma_ckv="Hckv", w_uq_qr="Hcq, N*(D+Dr)")
    check_scales(a, sizes)
    pages = "BlockNum, BlockSize, 1"
    caches = {"kv_cache": f"{pages}, Hckv", "kr_cache": f"{pages}, Dr", "k_scale_cache": f"{pages}, {KEY_TILES}"}
    check_letters(a, sizes, **caches, cache_index="T")
    check_index("cache_index", a.cache_index, sizes["BlockNum"] * sizes["BlockSize"])


def check_types(a: Arguments) -> None:
    codes = (torch.int8 if a.quantises_query else a.token_x.dtype,)
    own: dict[str, tuple[torch.dtype, ...]] = {"w_uq_qr": codes, "kv_cache": codes, "cache_index": (torch.int64,)}
    own |= dict.fromkeys(SCALE_NAMES, scale_dtypes(a.token_x.dtype))
    if a.w_dq.dtype == torch.int8:
        own |= dict.fromkeys(("w_dq", "w_dkv_kr"), (torch.int8,))
    check_tensors(vars(a), free=("gamma_cq", "gamma_ckv", "cos", "sin"), skip=own)
    for name, tensor in {"w_uq_qr": a.w_uq_qr, "kv_cache": a.kv_cache}.items():
        if tensor.dtype == torch.int8 and not a.quantises_query:
            shape = list(a.dequant_scale.shape)
            raise ValueError(f"dequant_scale has shape {shape}; with {name} in int8 it must be [N*(D+Dr), 1].")
    check_dtypes(a, own)


def check_scales(a: Arguments, sizes: Sizes) -> None:
    """Check that the scales of w_dq and w_dkv_kr are given exactly if these are int8, and those of the query if it is
    int8."""
    for name in ("dequant_scale_w_dq", "dequant_scale_w_dkv_kr"):
        check_optional(name, getattr(a, name), a.w_dq.dtype == torch.int8, f"w_dq of dtype {a.w_dq.dtype}")
    check_letters(a, sizes, dequant_scale_w_dq="1, Hcq", dequant_scale_w_dkv_kr="1, Hckv+Dr")
    if a.quantises_query:
        check_letters(a, sizes, dequant_scale="N*(D+Dr), 1", smooth_scales_cq="Hcq or 1, Hcq")
        return
    if a.smooth_scales_cq is not None:
        raise ValueError("smooth_scales_cq is given; it must be None with an empty dequant_scale.")
    if not a.is_symmetry:
        raise ValueError("is_symmetry is False; it must be True with an empty dequant_scale.")


# --- samples ----------------------------------------------------------------------------------------------------------


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
) -> Given:
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


operator = define(
    "mla_prolog_quant",
    Arguments,
    body,
    returns=(*RESULTS, *(f"{name}_out" for name in CACHES)),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes={f"{name}_out": name for name in CACHES},
)
