"""KvRmsNormRopeCache, written from its documents. Method 1 has latents and a rotary part, method 2 has keys and v."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npu.ge_ops import cache_writes
from npu.ge_ops.numbers import rms_norm, rotated, to_int8

PLAIN_MODES = ("Norm", "PA", "PA_BNSD")
MODES = (*PLAIN_MODES, "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


@dataclass(frozen=True)
class Quantisation:
    """How the rows of one cache are quantised: to int8 if there is a scale."""

    scale: Tensor | None
    offset: Tensor | None

    def rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [B, N, S, D] in float32, times a scale [D] or [N, D]: not rounded before it is int8."""
        if self.scale is None:
            return x.to(dtype)
        scaled = x * self.scale.unsqueeze(-2)
        return to_int8(scaled if self.offset is None else scaled + self.offset.unsqueeze(-2))


@dataclass(frozen=True)
class KeySide:
    """A call. Its caches are written, whatever else becomes of its rows."""

    kv: Tensor
    gamma: Tensor
    cos: Tensor
    sin: Tensor
    index: Tensor
    k_cache: Tensor
    ckv_cache: Tensor
    k_rope_scale: Tensor | None = None
    c_kv_scale: Tensor | None = None
    k_rope_offset: Tensor | None = None
    c_kv_offset: Tensor | None = None
    v: Tensor | None = None
    epsilon: float = 1e-5
    cache_mode: str = "Norm"
    is_output_kv: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.k_rope_scale is not None or self.c_kv_scale is not None

    @property
    def has_results(self) -> bool:
        """Says if k_rope and c_kv are more than undefined memory."""
        return self.is_output_kv and (self.cache_mode != "Norm" or (self.v is not None and self.is_quantised))

    def quantisation(self, scale: Tensor | None, offset: Tensor | None) -> Quantisation:
        """Kernels of method 1 leave out the offset."""
        return Quantisation(scale, None if self.v is None else offset)


def run(call: KeySide) -> tuple[Tensor, Tensor]:
    """k_rope and c_kv, undefined ones as NaN."""
    _check(call)
    keys, latents = _of_latents(call) if call.v is None else _of_keys(call)
    _write(call, call.k_cache, keys, call.quantisation(call.k_rope_scale, call.k_rope_offset))
    _write(call, call.ckv_cache, latents, call.quantisation(call.c_kv_scale, call.c_kv_offset))
    results = keys.to(call.kv.dtype), latents.to(call.kv.dtype)
    return results if call.has_results else tuple(torch.full_like(result, torch.nan) for result in results)


def _of_latents(call: KeySide) -> tuple[Tensor, Tensor]:
    """Method 1: kv is latents, which are normalised, and a rotary part, which is not."""
    rank = call.gamma.shape[-1]
    latents, rope = call.kv[..., :rank], call.kv[..., rank:]
    return rotated(rope, call.cos, call.sin), rms_norm(latents, call.gamma, call.epsilon)


def _of_keys(call: KeySide) -> tuple[Tensor, Tensor]:
    """Method 2: kv is keys, normalised as a whole and then rotated in their first columns. v stays as it is."""
    keys = rms_norm(call.kv, call.gamma, call.epsilon)
    width = call.cos.shape[-1]
    rope = rotated(keys[..., :width], call.cos, call.sin)
    return torch.cat((rope, keys[..., width:]), -1), call.v.float()


def _write(call: KeySide, cache: Tensor, rows: Tensor, quantisation: Quantisation) -> None:
    stored = quantisation.rows(rows, call.kv.dtype)
    if stored.dtype != cache.dtype:
        raise ValueError(f"a cache is {cache.dtype}; its rows are {stored.dtype} (int8 if there is a scale)")
    batch, _, steps, _ = call.kv.shape
    slots = _slots(call, batch, steps, cache.shape[1])
    if call.cache_mode == "Norm":
        addresses = cache_writes.in_sequences(cache, slots)
    elif call.cache_mode.endswith("NZ"):
        addresses = cache_writes.in_nz_pages(cache, slots)
    else:
        addresses = cache_writes.in_pages(cache, slots)
    cache_writes.write(cache, slots.flatten(), stored.transpose(1, 2).flatten(0, 1), addresses)


def _slots(call: KeySide, batch: int, steps: int, page: int) -> Tensor:
    """The slot of each token; positions in its sequence for "Norm". For pages, index has the first slots."""
    if "BLK" in call.cache_mode:
        return cache_writes.slots_of_blocks(call.index // page, [steps] * batch, page)
    return call.index.view(batch, steps) if call.cache_mode == "Norm" else call.index.view(batch * steps)


def _check(call: KeySide) -> None:
    if call.cache_mode not in MODES:
        raise ValueError(f"cache_mode is {call.cache_mode!r}; it is one of {MODES}")
    if call.cache_mode == "Norm" and call.v is None and call.is_quantised:
        raise ValueError("a cache is int8 in cache_mode 'Norm'; of latents only pages are")
    for name in ("k_rope", "c_kv"):
        if getattr(call, f"{name}_offset") is not None and getattr(call, f"{name}_scale") is None:
            raise ValueError(f"{name}_offset is given without {name}_scale")
    batch, _, steps, _ = call.kv.shape
    for_all = (1,) if call.cache_mode in PLAIN_MODES and not call.is_quantised else ()
    for name, table in (("cos", call.cos), ("sin", call.sin)):
        if table.shape[0] != batch or table.shape[2] not in (steps, *for_all):
            raise ValueError(f"{name} is {list(table.shape)}; it has rows for kv {list(call.kv.shape)}")
