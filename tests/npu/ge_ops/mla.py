"""The MLA operators. They write their caches in place; results come in the order of their GE definitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu.ge_ops import kv_rmsnorm_rope_cache, mla_prolog


def MlaProlog(token_x: Tensor, **rest: Any) -> tuple[Tensor, ...]:
    """Its tokens are never int8: the scales that they would need are reserved."""
    if token_x.dtype == torch.int8:
        raise ValueError("token_x is torch.int8; of MlaProlog it is torch.bfloat16")
    return MlaPrologV2(token_x=token_x, **rest)[:4]


def MlaPrologV2(kv_cache: Tensor, cache_mode: str, **rest: Any) -> tuple[Tensor, ...]:
    """Its quantisation is read off the dtypes; the query has a scale only if it is int8."""
    if cache_mode not in ("PA_BSND", "PA_NZ"):
        raise ValueError(f"cache_mode is {cache_mode!r}; of MlaProlog and MlaPrologV2 it is 'PA_BSND' or 'PA_NZ'")
    is_full = rest["token_x"].dtype == torch.int8
    weights = 2 if is_full else int(rest["weight_uq_qr"].dtype == torch.int8)
    caches = 0 if kv_cache.dtype != torch.int8 else 1 if is_full else 2
    modes = {"weight_quant_mode": weights, "kv_cache_quant_mode": caches, "query_quant_mode": int(caches == 1)}
    *results, scale, _, _ = MlaPrologV3(kv_cache, cache_mode=cache_mode, **rest, **modes)
    return *results, scale if caches == 1 else scale.new_zeros(1)


def MlaPrologV3(kv_cache: Tensor, kr_cache: Tensor, **rest: Any) -> tuple[Tensor, ...]:
    call = mla_prolog.Prolog(kv_cache=kv_cache, kr_cache=kr_cache, **rest)
    query, query_rope, *others = mla_prolog.run(call)
    return query, query_rope, kv_cache, kr_cache, *others


def KvRmsNormRopeCache(k_cache: Tensor, ckv_cache: Tensor, **rest: Any) -> tuple[Tensor, ...]:
    call = kv_rmsnorm_rope_cache.KeySide(k_cache=k_cache, ckv_cache=ckv_cache, **rest)
    return k_cache, ckv_cache, *kv_rmsnorm_rope_cache.run(call)


def InterleaveRope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Reads neighbouring pairs, writes halves; computed in float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    halves, turned = torch.cat([even, odd], -1), torch.cat([-odd, even], -1)
    return (halves * cos.float() + turned * sin.float()).to(x.dtype)


def RotaryMul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """Reads and writes halves; computed in float32."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * r1.float() + torch.cat([-second, first], -1) * r2.float()).to(x.dtype)
