"""MlaPrologV3 as Ascend 910B and 910_93 compute it, written from its documents: weight modes 0 to 2, cache modes 0 to
3. Tokens are flat here, [T, ...], whether they come as [B, S, ...] or as [T, ...]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npu.ge_ops import cache_writes
from npu.ge_ops.numbers import (
    dequantised,
    factors,
    multiplied,
    product,
    rms_norm,
    rotated,
    to_int8,
    to_int8_by_float16,
)

NONE, LATENT_INT8, ALL_INT8 = range(3)  # weight_quant_mode
PER_TENSOR, PER_CHANNEL, PER_TILE = 1, 2, 3  # kv_cache_quant_mode
CACHES_OF_WEIGHTS = {NONE: (NONE,), LATENT_INT8: (NONE, PER_CHANNEL, PER_TILE), ALL_INT8: (NONE, PER_TENSOR, PER_TILE)}
PAGED = ("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ")
CACHE_MODES = (*PAGED, "BSND", "TND")


@dataclass(frozen=True)
class Prolog:
    """A call."""

    token_x: Tensor
    weight_dq: Tensor
    weight_uq_qr: Tensor
    weight_uk: Tensor
    weight_dkv_kr: Tensor
    rmsnorm_gamma_cq: Tensor
    rmsnorm_gamma_ckv: Tensor
    rope_sin: Tensor
    rope_cos: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    cache_index: Tensor | None = None
    dequant_scale_x: Tensor | None = None
    dequant_scale_w_dq: Tensor | None = None
    dequant_scale_w_uq_qr: Tensor | None = None
    dequant_scale_w_dkv_kr: Tensor | None = None
    quant_scale_ckv: Tensor | None = None
    quant_scale_ckr: Tensor | None = None
    smooth_scales_cq: Tensor | None = None
    actual_seq_len: Tensor | None = None
    k_nope_clip_alpha: Tensor | None = None
    rmsnorm_epsilon_cq: float = 1e-5
    rmsnorm_epsilon_ckv: float = 1e-5
    cache_mode: str = "PA_BSND"
    query_norm_flag: bool = False
    weight_quant_mode: int = 0
    kv_cache_quant_mode: int = 0
    query_quant_mode: int = 0
    ckvkr_repo_mode: int = 0
    quant_scale_repo_mode: int = 0
    tile_size: int = 128
    qc_qr_scale: float = 1.0
    kc_scale: float = 1.0

    @property
    def tokens(self) -> Tensor:
        return self.token_x.flatten(0, -2)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, Dr]."""
        return self.rope_cos.flatten(0, -2), self.rope_sin.flatten(0, -2)

    def of_tokens(self, result: Tensor) -> Tensor:
        """[T, ...] as the tokens came."""
        return result.unflatten(0, self.token_x.shape[:-1])


def run(call: Prolog) -> tuple[Tensor, ...]:
    """query, query_rope, dequant_scale_q_nope, query_norm and dequant_scale_q_norm. What a mode has not is empty."""
    _check(call)
    norm, norm_scale = _normed_query(call)
    query, query_rope = _heads(call, norm, norm_scale)
    scale = torch.zeros(0)
    if call.kv_cache_quant_mode == PER_TENSOR:
        query, query_rope, scale = _quantised_query(call, query, query_rope)
    _store(call)
    results = call.of_tokens(query), call.of_tokens(query_rope), scale
    if not call.query_norm_flag:
        return *results, norm.new_zeros(0), torch.zeros(0)
    return *results, call.of_tokens(norm), torch.zeros(0) if norm_scale is None else norm_scale


# --- the query ----------------------------------------------------------------------------------------------------


def _normed_query(call: Prolog) -> tuple[Tensor, Tensor | None]:
    """The norm of the query's latent [T, Hcq], in bfloat16, or in int8 and a scale [T, 1] of each token."""
    latent = _projected(call, call.weight_dq, call.dequant_scale_w_dq)
    norm = multiplied(rms_norm(latent, call.rmsnorm_gamma_cq, call.rmsnorm_epsilon_cq), call.qc_qr_scale)
    if call.weight_quant_mode == NONE:
        return norm.bfloat16(), None
    if call.smooth_scales_cq is not None:
        norm = norm * call.smooth_scales_cq
    factor, scale = factors(norm)
    return to_int8(norm * factor), scale


def _projected(call: Prolog, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Tokens times a weight: in bfloat16, or in float32 if both are int8."""
    result = product(call.tokens, weight)
    return dequantised(result, call.dequant_scale_x, scale) if call.weight_quant_mode == ALL_INT8 else result


def _heads(call: Prolog, norm: Tensor, norm_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """query [T, N, Hckv] and query_rope [T, N, Dr] in bfloat16."""
    heads, nope, _ = call.weight_uk.shape
    up = product(norm, call.weight_uq_qr)
    if norm_scale is not None:
        up = dequantised(up, norm_scale, call.dequant_scale_w_uq_qr)
    up = up.unflatten(-1, (heads, -1))
    query = product(up[..., :nope].bfloat16().transpose(0, 1), call.weight_uk).transpose(0, 1)
    cos, sin = (table.unsqueeze(1) for table in call.tables)
    return query, rotated(up[..., nope:], cos, sin).bfloat16()


def _quantised_query(call: Prolog, query: Tensor, query_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query in int8, with a scale [T, N, 1]. The rotary part is divided by the scales that attention multiplies
    by, those of the query and of keys."""
    factor, scale = factors(query.float())
    rope = query_rope.float() * (call.quant_scale_ckv.flatten()[0] / scale)
    return to_int8_by_float16(query.float() * factor), rope.bfloat16(), scale


# --- the keys -----------------------------------------------------------------------------------------------------


def _store(call: Prolog) -> None:
    """Write latents and rotated keys into the caches."""
    projected = _projected(call, call.weight_dkv_kr, call.dequant_scale_w_dkv_kr)
    rank = call.weight_uk.shape[2]
    norm = rms_norm(projected[:, :rank], call.rmsnorm_gamma_ckv, call.rmsnorm_epsilon_ckv)
    latents, keys = multiplied(norm, call.kc_scale), rotated(projected[:, rank:], *call.tables).bfloat16()
    if call.kv_cache_quant_mode == PER_TILE:
        _write(call, call.kv_cache, _packed(call, latents, keys))
        return
    if call.kv_cache_quant_mode == PER_TENSOR:
        latents = to_int8(latents * call.quant_scale_ckv.flatten()[0])
    elif call.kv_cache_quant_mode == PER_CHANNEL:
        latents, keys = to_int8(latents * call.quant_scale_ckv), to_int8(keys.float() * call.quant_scale_ckr)
    else:
        latents = latents.bfloat16()
    _write(call, call.kv_cache, latents)
    _write(call, call.kr_cache, keys)


def _packed(call: Prolog, latents: Tensor, keys: Tensor) -> Tensor:
    """Rows of bytes: int8 codes, keys in bfloat16, and a float32 scale for each tile. Tiles are clipped to a part of
    their largest value."""
    tiles = latents.unflatten(-1, (-1, call.tile_size))
    largest = tiles.abs().amax(-1, keepdim=True)
    limit = largest * call.k_nope_clip_alpha
    scale = limit * (1 / 127)
    codes = to_int8(tiles.clamp(-limit, limit) * scale.reciprocal())
    parts = codes.flatten(1), keys.contiguous(), scale.flatten(1).contiguous()
    return torch.cat([part.view(torch.int8) for part in parts], -1)


def _write(call: Prolog, cache: Tensor, rows: Tensor) -> None:
    if rows.dtype != cache.dtype:
        raise ValueError(f"a cache is {cache.dtype}; kv_cache_quant_mode {call.kv_cache_quant_mode} has {rows.dtype}")
    if call.cache_mode not in PAGED:
        slots = torch.arange(len(rows))
        addresses = cache_writes.in_order(cache, len(rows))
    else:
        slots = _slots(call, cache.shape[1])
        nz = call.cache_mode.endswith("NZ")
        addresses = (cache_writes.in_nz_pages if nz else cache_writes.in_pages)(cache, slots)
    if cache.numel():
        cache_writes.write(cache, slots, rows.unsqueeze(1), addresses)


def _slots(call: Prolog, page: int) -> Tensor:
    """The slot of each token; for blocks, cache_index has their numbers."""
    if "BLK" not in call.cache_mode:
        return call.cache_index.flatten()
    if call.token_x.ndim == 3:
        batch, steps, _ = call.token_x.shape
        return cache_writes.slots_of_blocks(call.cache_index, [steps] * batch, page)
    if call.actual_seq_len is None:
        raise ValueError(f"actual_seq_len is None; tokens [T, He] need it in cache_mode {call.cache_mode!r}")
    ends = call.actual_seq_len.tolist()
    if ends != sorted(ends) or ends[-1:] != [len(call.tokens)]:
        raise ValueError(f"actual_seq_len is {ends}; it is ends that grow, the last of them {len(call.tokens)}")
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return cache_writes.slots_of_blocks(call.cache_index, lengths, page)


# --- what a call may be -------------------------------------------------------------------------------------------


def _check(call: Prolog) -> None:
    """That its modes are known, and go together."""
    weights, caches = call.weight_quant_mode, call.kv_cache_quant_mode
    if caches not in CACHES_OF_WEIGHTS.get(weights, ()):
        raise ValueError(f"weight_quant_mode is {weights} and kv_cache_quant_mode is {caches}; no kernel has both")
    if call.query_quant_mode != (caches == PER_TENSOR):
        raise ValueError(f"query_quant_mode is {call.query_quant_mode} in kv_cache_quant_mode {caches}")
    packed = int(caches == PER_TILE)
    if (call.ckvkr_repo_mode, call.quant_scale_repo_mode) != (packed, packed) or call.tile_size != 128:
        raise ValueError(f"rows are packed otherwise than in kv_cache_quant_mode {caches}")
    if call.cache_mode not in CACHE_MODES or (packed and call.cache_mode not in ("PA_BSND", "BSND", "TND")):
        raise ValueError(f"cache_mode is {call.cache_mode!r} in kv_cache_quant_mode {caches}")
    if packed and call.kr_cache.numel():
        raise ValueError("kr_cache is not empty; packed rows have their keys in kv_cache")
