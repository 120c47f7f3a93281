"""mla_prolog: everything of one MLA layer from the hidden states to the attention, cache write included.

Three overloads with the interfaces of torch_npu: npu_mla_prolog, npu_mla_prolog_v3, and the order of the one with the
options of the other. A call of `torch.ops.mla_fx.mla_prolog` means the first, in order of definition, that takes it.
"""

import functools
import inspect
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from mla_fx.ops.common.cache import like_store, store, store_
from mla_fx.ops.common.check import check_choice, check_optional, check_rank, check_shape, check_tensors
from mla_fx.ops.common.define import Kernel, Sample, define
from mla_fx.ops.common.math import check_rope, latent_and_key, rms_norm, rope
from mla_fx.ops.common.sample import Sampler
from mla_fx.ops.mla_prolog_v3 import check as check_v3
from mla_fx.ops.mla_prolog_v3 import operator as v3_body
from mla_fx.ops.mla_prolog_v3 import samples as samples_v3
from mla_fx.ops.mla_prolog_v3.check import check_layout, check_slots

# For each cache mode the axes of token_x, and those of the caches before the last.
CACHE_MODES = {
    "PA_BSND": check_v3.PAGES,
    "PA_NZ": check_v3.PAGES,
    "Norm": ("B, S, He", "B, 1, T"),
    "BSND": ("B, S, He", "B, S, 1"),
    "TND": ("T, He", "T, 1"),
}
QUANTIZED_MODES = ("PA_BSND", "PA_NZ", "BSND", "TND")

# The scales that the page of npu_mla_prolog calls reserved: those that its kernel reads all the same, and the others.
USED = ("dequant_scale_w_uq_qr", "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")
UNUSED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")
RESERVED = f"npu_mla_prolog documents {', '.join(USED)} as reserved; they are used here as its kernel uses them."

CACHES = {"kv_cache_out": "kv_cache", "kr_cache_out": "kr_cache"}


def body(
    token_x: Tensor,
    weight_dq: Tensor | None,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor | None,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor | None,
    rope_cos: Tensor | None,
    cache_index: Tensor | None,
    kv_cache: Tensor,
    kr_cache: Tensor,
    dequant_scale_x: Tensor | None = None,
    dequant_scale_w_dq: Tensor | None = None,
    dequant_scale_w_uq_qr: Tensor | None = None,
    dequant_scale_w_dkv_kr: Tensor | None = None,
    quant_scale_ckv: Tensor | None = None,
    quant_scale_ckr: Tensor | None = None,
    smooth_scales_cq: Tensor | None = None,
    *,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    rope_layout: str = "interleave_half",
    gamma_after_cast: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The absorbed query of MLA, and the caches with this step's latents::

        u          = RMSNorm(token_x @ weight_dq) @ weight_uq_qr     (token_x @ weight_uq_qr without weight_dq)
        query      = u[nope of head n] @ weight_uk[n]
        query_rope = RoPE(u[rope of head n])
        k          = token_x @ weight_dkv_kr
        kv_cache[cache_index] = RMSNorm(k[:Hckv]);  kr_cache[cache_index] = RoPE(k[Hckv:])

    token_x is [B, S, He] or [T, He]; weight_dq [He, Hcq] or None, together with rmsnorm_gamma_cq [Hcq]; weight_uq_qr
    [Hcq, N*(D+Dr)], for each head D nope then Dr rope columns; weight_uk [N, D, Hckv]; weight_dkv_kr [He, Hckv+Dr];
    rmsnorm_gamma_ckv [Hckv]; rope_sin and rope_cos [B or 1, S, Dr] or [T, Dr], both None for a model without rotation.
    Strides are free. Tensors share the dtype of token_x (bfloat16, float16, float32, float64); gammas and tables may be
    any of these. Matmuls round to it; RMSNorm runs in float32, or float64 for float64, with rmsnorm_epsilon_cq and
    rmsnorm_epsilon_ckv under its root.

    cache_mode says what the caches [..., Hckv] and [..., Dr] and the int64 cache_index are:
    "PA_BSND" [BlockNum, BlockSize, 1, *], index [B, S] or [T] over the BlockNum*BlockSize slots;
    "PA_NZ" the same, the bytes of a page being those of [*/n0, BlockSize, n0], n0 elements 32 bytes; BlockSize is a
    multiple of 16 up to 1024, n0 divides the widths, only axis 0 may have gaps;
    "Norm" [B, 1, T, *], index [B or 1, S] of positions inside the batch row;
    "BSND" [B, S, 1, *] and "TND" [T, 1, *], no index: the new rows in token order are the new cache.
    A negative index stores nothing for its token. Equal non-negative indices leave either row.

    rope_layout is (layout read)_(layout written), "interleave_half", "half_half" or "interleave_interleave".
    gamma_after_cast multiplies by gamma after rounding the normalised value, as Hugging Face does.

    An int8 weight_uq_qr means weight_quant_mode 1 of `mla_prolog.v3`, with dequant_scale_w_uq_qr and perhaps
    smooth_scales_cq; int8 caches then mean its kv_cache_quant_mode 2, with quant_scale_ckv and quant_scale_ckr. All
    else is as there too: no "Norm", no other rope_layout, no gamma_after_cast, no None for a tensor. The page of
    npu_mla_prolog calls all seven scales reserved, but its kernel reads these four, hence a UserWarning;
    dequant_scale_x, dequant_scale_w_dq and dequant_scale_w_dkv_kr are refused: `mla_prolog.v3` has the mode for them.

    Returns query [B, S, N, Hckv], query_rope [B, S, N, Dr] (or [T, N, *]), kv_cache_out, kr_cache_out; the twin
    `mla_prolog_` writes the caches instead and returns the first two, for the vendor's kernel writes them although its
    schema says otherwise. Raises ValueError for arguments that do not fit; index values are checked on the CPU only,
    unless within `check_values`. Inference only.

    Source: torch_npu.npu_mla_prolog. Its page wants token_x [B, S, He] with S up to 16, and PyTorch 2.1 for graphs; the
    kernel takes any S and [T, He], and here any PyTorch will do.
    """
    if weight_uq_qr.dtype == torch.int8:
        return partly_quantized(**locals())
    *tokens, _ = token_x.shape
    heads, nope, rank = weight_uk.shape
    compressed = token_x
    if weight_dq is not None and rmsnorm_gamma_cq is not None:
        compressed = rms_norm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq, gamma_after_cast)
    up = (compressed @ weight_uq_qr).view(*tokens, heads, weight_uq_qr.shape[1] // heads)
    query = torch.bmm(up[..., :nope].flatten(0, -3).transpose(0, 1), weight_uk).transpose(0, 1).contiguous()
    cos, sin = (None if table is None else table.unsqueeze(-2) for table in (rope_cos, rope_sin))
    query_rope = rope(up[..., nope:], cos, sin, rope_layout).contiguous()
    kv = token_x @ weight_dkv_kr
    latent, key_rope = latent_and_key(
        kv, rmsnorm_gamma_ckv, rope_cos, rope_sin, rmsnorm_epsilon_ckv, rope_layout, gamma_after_cast
    )
    kv_cache = store(kv_cache, cache_index, latent, cache_mode)
    kr_cache = store(kr_cache, cache_index, key_rope, cache_mode)
    return query.view(*tokens, heads, rank), query_rope, kv_cache, kr_cache


def partly_quantized(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, query_rope, *_, kv_cache, kr_cache = v3_body.body(**as_v3(**arguments))
    return query, query_rope, kv_cache, kr_cache


def as_v3(*, rope_layout: str, gamma_after_cast: bool, **arguments: Any) -> dict[str, Any]:
    """The arguments of `mla_prolog.v3` that mean the same where weight_uq_qr is int8."""
    modes = {"weight_quant_mode": 1, "kv_cache_quant_mode": 2 if arguments["kv_cache"].dtype == torch.int8 else 0}
    bound = inspect.signature(v3_body.body).bind(**arguments, **modes)
    bound.apply_defaults()
    return bound.arguments


def body_(*, cache_index: Tensor | None, kv_cache: Tensor, kr_cache: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
    # Without an index, body returns the new rows in place of the caches.
    query, query_rope, latent, key_rope = body(cache_index=None, kv_cache=kv_cache, kr_cache=kr_cache, **rest)
    store_(kv_cache, cache_index, latent.squeeze(-2), rest["cache_mode"])
    store_(kr_cache, cache_index, key_rope.squeeze(-2), rest["cache_mode"])
    return query, query_rope


def check(**arguments: Any) -> None:
    for name in UNUSED:
        check_optional(name, arguments[name], False, "this interface; mla_prolog.v3 takes it in weight_quant_mode 2")
    if arguments["weight_uq_qr"].dtype == torch.int8:
        check_quantized(arguments)
    else:
        check_unquantized(arguments)
    if not is_fake(arguments["token_x"]) and any(arguments[name] is not None for name in USED):
        warnings.warn(RESERVED, stacklevel=2)


def check_quantized(arguments: dict[str, Any]) -> None:
    when = "an int8 weight_uq_qr"
    for name in ("weight_dq", "rmsnorm_gamma_cq", "rope_sin", "rope_cos"):
        check_optional(name, arguments[name], True, when)
    check_choice("cache_mode", arguments["cache_mode"], QUANTIZED_MODES)
    check_choice("rope_layout", arguments["rope_layout"], ("interleave_half",))
    if arguments["gamma_after_cast"]:
        raise ValueError(f"gamma_after_cast is True; it must be False with {when}.")
    check_v3.check(**as_v3(**arguments))


def check_unquantized(arguments: dict[str, Any]) -> None:
    a = SimpleNamespace(**arguments)
    for name in USED:
        check_optional(name, arguments[name], False, f"a weight_uq_qr of {a.weight_uq_qr.dtype}")
    free = ("rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
    check_tensors(arguments, free=free, skip="cache_index")
    check_choice("cache_mode", a.cache_mode, tuple(CACHE_MODES))
    check_rank("token_x", a.token_x, CACHE_MODES[a.cache_mode][0])
    check_rank("weight_uk", a.weight_uk, "N, D, Hckv")
    *tokens, hidden = a.token_x.shape
    heads, nope, rank = a.weight_uk.shape
    check_shape("weight_dkv_kr", a.weight_dkv_kr, "He, Hckv+Dr", (hidden, None))
    width = a.weight_dkv_kr.shape[1] - rank
    check_shape("rmsnorm_gamma_ckv", a.rmsnorm_gamma_ckv, "Hckv", (rank,))
    letters = "B, S, Dr" if len(tokens) == 2 else "T, Dr"
    check_rope(width, a.rope_layout, letters, (*tokens, width), rope_sin=a.rope_sin, rope_cos=a.rope_cos)
    compressed = check_compression(a.weight_dq, a.rmsnorm_gamma_cq, hidden)
    check_shape("weight_uq_qr", a.weight_uq_qr, "Hcq, N*(D+Dr)", (compressed, heads * (nope + width)))
    check_caches(a, tokens, rank, width)


def check_compression(weight_dq: Tensor | None, gamma: Tensor | None, hidden: int) -> int:
    """The width of the compressed query."""
    if weight_dq is None and gamma is None:
        return hidden
    if weight_dq is None or gamma is None:
        raise ValueError("Only one of weight_dq and rmsnorm_gamma_cq is given; both must be tensors or both None.")
    check_shape("weight_dq", weight_dq, "He, Hcq", (hidden, None))
    check_shape("rmsnorm_gamma_cq", gamma, "Hcq", (weight_dq.shape[1],))
    return weight_dq.shape[1]


def check_caches(a: SimpleNamespace, tokens: list[int], rank: int, width: int) -> None:
    """The caches and cache_index fit cache_mode."""
    letters = CACHE_MODES[a.cache_mode][1]
    pages = (None, None, 1)
    lead = {"PA_BSND": pages, "PA_NZ": pages, "Norm": (tokens[0], 1, None)}.get(a.cache_mode, (*tokens, 1))
    check_shape("kv_cache", a.kv_cache, f"{letters}, Hckv", (*lead, rank))
    check_shape("kr_cache", a.kr_cache, f"{letters}, Dr", (*a.kv_cache.shape[:-1], width))
    if a.cache_mode == "PA_NZ":
        check_layout("kv_cache", a.kv_cache, a.cache_mode)
        check_layout("kr_cache", a.kr_cache, a.cache_mode)
    indexed = a.cache_mode in ("PA_BSND", "PA_NZ", "Norm")
    if indexed != (a.cache_index is not None):
        fault = "None; it must be an int64 tensor" if indexed else "given; it must be None"
        raise ValueError(f"cache_index is {fault} with cache_mode {a.cache_mode!r}.")
    if not indexed:
        return
    norm = a.cache_mode == "Norm"
    slots = a.kv_cache.shape[2] if norm else a.kv_cache.shape[0] * a.kv_cache.shape[1]
    check_shape("cache_index", a.cache_index, "B, S" if len(tokens) == 2 else "T", tokens, broadcast=norm)
    check_slots(a.cache_index, slots)


def fake(**arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = SimpleNamespace(**arguments)
    rows = (*a.token_x.shape[:-1], a.weight_uk.shape[0])
    query = a.token_x.new_empty(*rows, a.weight_uk.shape[2])
    query_rope = a.token_x.new_empty(*rows, a.kr_cache.shape[-1])
    return query, query_rope, like_store(a.kv_cache, a.cache_index), like_store(a.kr_cache, a.cache_index)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Every cache mode and rope layout, with and without compression, rotation, skipped tokens and quantisation."""
    yield Sample("PA_BSND", *sample(dtype, 0, "PA_BSND", (2, 3)))
    yield Sample("PA_BSND", *sample(dtype, 1, "PA_BSND", (5,), skip=2, rope_layout="half_half", gamma_after_cast=True))
    yield Sample("Norm", *sample(dtype, 2, "Norm", (2, 3), rope_layout="half_half", compress=False))
    yield Sample(
        "Norm", *sample(dtype, 3, "Norm", (2, 1), skip=1, rope_layout="interleave_interleave", rmsnorm_epsilon_cq=0.1)
    )
    yield Sample("BSND", *sample(dtype, 4, "BSND", (2, 3), rmsnorm_epsilon_ckv=0.1))
    args, kwargs = sample(dtype, 5, "TND", (4,))
    yield Sample("TND", (*args[:7], None, None, *args[9:]), kwargs)
    yield quantized_sample("PA_NZ", dtype, 0, 0, "PA_NZ", (5,), skip=1)
    yield quantized_sample("PA_BSND, int8 weight_uq_qr", dtype, 1, 0, "PA_BSND", (2, 3), smooth=True)
    yield quantized_sample("TND, int8 weight_uq_qr", dtype, 1, 0, "TND", (4,))
    yield quantized_sample("PA_BSND, int8 caches", dtype, 1, 2, "PA_BSND", (5,), skip=2)
    yield quantized_sample("PA_NZ, int8 caches", dtype, 1, 2, "PA_NZ", (2, 3), smooth=True)
    yield quantized_sample("BSND, int8 caches", dtype, 1, 2, "BSND", (2, 3))


def sample(
    dtype: torch.dtype, seed: int, mode: str, tokens: tuple[int, ...], skip: int = 0, compress: bool = True, **rest: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden, heads, nope, rank, width, room = 32, 3, 8, 16, 4, 16
    query_rank = 24 if compress else hidden
    draw = Sampler(dtype, seed)
    index = draw.slots(torch.Size(tokens).numel(), room, skip)
    lead = {"PA_BSND": (room // 4, 4, 1), "Norm": (tokens[0], 1, room)}.get(mode, (*tokens, 1))
    arguments = (
        draw.normal(*tokens, hidden),
        draw.weight(hidden, query_rank, fan_in=hidden) if compress else None,
        draw.weight(query_rank, heads * (nope + width), fan_in=query_rank),
        draw.weight(heads, nope, rank, fan_in=nope),
        draw.weight(rank + width, hidden, fan_in=hidden).mT,
        draw.gamma(query_rank) if compress else None,
        draw.gamma(rank),
        *draw.tables(*tokens, width),
        index.view(tokens) if mode in ("PA_BSND", "Norm") else None,
        draw.normal(*lead, rank),
        draw.normal(*lead, width),
    )
    return arguments, {"cache_mode": mode, **rest}


def quantized_sample(mode: str, *call: Any, **options: Any) -> Sample:
    """A sample of v3 as a call of this interface, which takes from the dtypes what v3 takes from its modes."""
    _, args, kwargs = samples_v3.sample(*call, **options)
    rest = {name: value for name, value in kwargs.items() if name in ("cache_mode", *USED)}
    return Sample(mode, (*args[:9], kwargs["cache_index"], *args[9:]), rest)


def in_v1_order(body: Kernel) -> Kernel:
    """`body` of v3 with cache_index where npu_mla_prolog has it, behind the tables."""
    signature = inspect.signature(body)
    parameters = dict(signature.parameters)
    index = parameters.pop("cache_index").replace(default=inspect.Parameter.empty)
    ordered = list(parameters.values())
    signature = signature.replace(parameters=[*ordered[:9], index, *ordered[9:]])

    @functools.wraps(body)
    def reordered(*args: Any, **kwargs: Any) -> Any:
        return body(**signature.bind(*args, **kwargs).arguments)

    reordered.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks for
    return reordered


operator = define(
    "mla_prolog",
    body,
    returns=("query", "query_rope", *CACHES),
    check=check,
    fake=fake,
    samples=samples,
    in_place=body_,
    writes=CACHES,
)
define_v3 = functools.partial(
    define,
    returns=("query", "query_rope", "dequant_scale_q_nope", "query_norm", "dequant_scale_q_norm", *CACHES),
    check=check_v3.check,
    fake=v3_body.fake,
    in_place=v3_body.body_,
    writes=CACHES,
    lengths=("actual_seq_len",),
    traceable=False,
)
modes = define_v3("mla_prolog.modes", in_v1_order(v3_body.body), samples=samples_v3.samples_in_v1_order)
v3 = define_v3("mla_prolog.v3", v3_body.body, samples=samples_v3.samples)
