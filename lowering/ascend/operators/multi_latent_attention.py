"""Lowers multi_latent_attention to FusedInferAttentionScore, or in captured graphs to ATB's operator.

GE has no converter for ATB's, and torchair does not update its lengths between replays of a captured graph: each new
length is captured anew. So it is called only where the other kernel does not take the call. ATB leaves the rows of
sequences without context undefined. `mla_fx.multi_latent_attention` sets them to zero."""

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.called.multi_latent_attention.arguments import (
    INT8,
    MERGED,
    NZ,
    RING,
    SPEC,
    SPLIT,
    Arguments,
    is_causal,
    modes,
    results,
)
from mla_fx.ops.common.paged import TILE
from mla_fx.target import Compiled

from .. import limits
from ..fused_infer_attention_score import KERNEL, refuse_latent, refuse_packed
from ..limits import A2, A3, Surface
from .paged_attention import attend_to_pages

OPERATOR = "multi_latent_attention"
ATB = "MultiLatentAttentionOperation"
NO_CONVERTER = f"torch.ops.atb has no converter to GE, and {KERNEL}, which has one, takes"


def lower(surface: Surface, a: Arguments) -> Compiled:
    try:
        refuse_for_kernel(surface, a)
    except NoMatch:
        if surface.mode == "ge":
            raise
        refuse_for_atb(surface, a)
        return as_atb
    return as_fused_infer_attention_score


# --- what the kernels cannot do -----------------------------------------------------------------------------------


def refuse_for_kernel(surface: Surface, a: Arguments) -> None:
    mode = modes(a)
    if mode.cache not in (SPLIT, NZ):
        raise NoMatch(f"cache_mode is {mode.cache!r}; {NO_CONVERTER} {SPLIT!r} or {NZ!r}")
    if mode.calc == SPEC and not is_causal(a.q_nope):
        heads = a.q_nope.shape[1]
        raise NoMatch(f"q_nope has {heads} heads; {NO_CONVERTER} {SPEC!r} with 128 heads only, where it is causal")
    if a.q_seqlen is not None:
        refuse_packed(surface, "q_seqlen is given")
    if surface.mode == "aclgraph" and not surface.reads_ahead and is_tensor(a.context_lens, a.q_seqlen):
        raise NoMatch(f"context_lens is a tensor; a captured {KERNEL} takes numbers on the host")
    assert a.q_rope is not None and a.k_rope is not None, "a merged cache was refused"
    caches = [("ctkv", a.ctkv), ("k_rope", a.k_rope)]
    refuse_latent(surface, ("q_nope", a.q_nope), ("q_rope", a.q_rope), caches)


def is_tensor(*lengths: object) -> bool:
    return any(isinstance(given, Tensor) for given in lengths)


def refuse_for_atb(surface: Surface, a: Arguments) -> None:
    mode = modes(a)
    limits.chip(surface, ATB, (A2, A3))
    if mode.cache == MERGED:
        raise NoMatch(f"cache_mode is {mode.cache!r}; torch.ops.atb takes latents and rotary keys in two caches")
    if mode.cache == INT8 and mode.calc == RING:
        has = f"with cache_mode {mode.cache!r}, torch_npu has lse in the wrong dtype"
        raise NoMatch(f"calc_type is {mode.calc!r}; {has}")
    for name in ("context_lens", "q_seqlen"):
        if isinstance(getattr(a, name), Tensor):
            raise NoMatch(f"{name} is a tensor; torch.ops.atb takes a host list, as the overload `host` does")
    if any(limits.known_equal(length, 0) for length in a.context_lens):
        leaves = f"{ATB} leaves the rows of sequences without a context undefined"
        raise NoMatch(f"context_lens is {a.context_lens}; {leaves}")
    for name in ("q_rope", "k_rope"):
        limits.dtype(name, getattr(a, name), ATB, limits.HALVES)
    for name in ("ctkv", "k_rope"):
        limits.dense(name, getattr(a, name), ATB)


# --- the calls ----------------------------------------------------------------------------------------------------


def as_fused_infer_attention_score(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    latent, is_ring = pages(a.ctkv), modes(a).calc == RING
    out, lse = attend_to_pages(
        surface,
        a.q_nope,
        latent,
        latent,
        a.block_tables,
        a.context_lens,
        steps=a.q_seqlen,
        query_rope=a.q_rope,
        key_rope=None if a.k_rope is None else pages(a.k_rope),
        softmax_scale=a.qk_scale,
        block_size=TILE,
        num_key_value_heads=1,
        return_softmax_lse=is_ring,
    )
    if not is_ring:
        return out, out.new_empty(0)
    # the kernel's sign for a row that sees no key is plus infinity
    return out, lse.masked_fill(lse == torch.inf, -torch.inf).squeeze(-1).to(out.dtype)


def pages(cache: Tensor) -> Tensor:
    """[BlockNum, 128, 1, width] without the head dimension, or FRACTAL_NZ [BlockNum, width/16, 128, 16] with one."""
    is_plain = limits.holds(cache.shape[1] == TILE)
    return cache.squeeze(2) if is_plain else cache.unsqueeze(1)


def as_atb(surface: Surface, a: Arguments) -> tuple[Tensor, Tensor]:
    assert a.q_rope is not None, "a merged cache was refused"
    mode = modes(a)
    positional = (
        a.q_nope.contiguous(),
        a.q_rope.contiguous(),
        a.ctkv,
        a.k_rope,
        a.block_tables.to(torch.int32).contiguous(),
        a.context_lens,
        a.q_nope.shape[1],
        a.qk_scale,
        1,
    )
    options = {
        "mask": None if a.mask is None else a.mask.contiguous(),
        "qseqlen": a.q_seqlen,
        "qk_descale": a.qk_descale,
        "pv_descale": a.pv_descale,
        "mask_type": mode.mask,
        "calc_type": mode.calc,
        "cache_mode": mode.cache,
    }
    if mode.calc == RING:
        out, lse = torch.ops.atb.npu_multi_head_latent_attention.lse(*positional, True, **options)
        return out, lse
    out = torch.ops.atb.npu_multi_head_latent_attention(*positional, **options)
    return out, out.new_empty(0, dtype=results(a, mode)[1].dtype)
