"""Lowers mla_prolog to the newest interface of the vendor's kernel, MlaPrologV3, or to the first ones if selected.

The first two are npu_mla_prolog and npu_mla_prolog_v2. In GE graphs they mutate the caches, although their schemas say
otherwise. GE orders reads and writes only by data dependencies, so a reader of the old cache could see it already
overwritten. They therefore write to copies. torchair removes such copies only for the third interface, so each step
copies both caches here. A captured graph would contain the hidden mutation too, and is refused."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.cache import of_pages, page_shape
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments
from mla_fx.ops.emitted.mla_prolog.check import as_v3
from mla_fx.target import Compiled

from .. import limits, prolog_form
from ..converters import copied
from ..limits import A2, A3, Surface
from ..prolog_form import CommonRules, in_fractals
from . import mla_prolog_v3
from .mla_prolog_v3 import KERNEL

OPERATOR = "mla_prolog"
CACHES = ("kv_cache", "kr_cache")
OWN_MODES = ("Norm", "BSND", "NZ")  # not in the vendor's first interface

# Of the first two interfaces.
DENSE = ("token_x", "weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos")
TOKENS = 16  # S of token_x [B, S, He], at most
FACTORS = ("qc_qr_scale", "kc_scale")
OWN = ("rope_layout", "gamma_after_cast", *FACTORS)  # arguments that only `mla_fx.mla_prolog` has

V2 = CommonRules(hidden=(7168,), query_ranks=(1536,), nope=(128,), pages=(16, 128), cache_modes=("PA_BSND", "PA_NZ"))
VERSIONS = {"v1": ("MlaProlog", replace(V2, heads=(32, 64, 128))), "v2": ("MlaPrologV2", V2)}


# --- what the kernel cannot do ---------------------------------------------------------------------------------------


def lower(surface: Surface, a: Arguments) -> Compiled:
    refuse_left_out(surface, a)
    prolog_form.refuse_rotations(surface, a, kernel(surface))
    if a.cache_mode in OWN_MODES:
        prolog_form.refuse_formats(surface, kernel(surface))
    if a.cache_mode == "Norm":
        prolog_form.refuse_unpaged(a, kernel(surface))
    if a.cache_mode == "NZ":
        for name in CACHES:
            limits.fractals(name, getattr(a, name), kernel(surface))
        paged = of_pages(a, *CACHES, form=page_shape)
    else:
        paged = prolog_form.paged(a, prolog_form.page_shapes)
    if surface.prolog == "v3":
        mla_prolog_v3.refuse_unsupported(surface, as_v3(paged))
    else:
        refuse_unsupported(surface, paged)
    return prolog


def kernel(surface: Surface) -> str:
    return KERNEL if surface.prolog == "v3" else VERSIONS[surface.prolog][0]


def refuse_left_out(surface: Surface, a: Arguments) -> None:
    if a.weight_dq is None:
        raise NoMatch(f"weight_dq is None; {kernel(surface)} computes the query from a compressed one")
    if a.rope_sin is None:
        raise NoMatch(f"rope_sin and rope_cos are None; {kernel(surface)} always rotates")


def refuse_unsupported(surface: Surface, a: Arguments) -> None:
    """Raises NoMatch unless the kernel of one of the first two interfaces takes this call."""
    kernel, allowed = VERSIONS[surface.prolog]
    limits.chip(surface, kernel, (A2, A3))
    if surface.mode == "aclgraph":
        writes = f"{kernel} writes caches that its schema marks as read-only"
        raise NoMatch(f"{writes}; a captured graph does not order such writes")
    limits.choice("cache_mode", a.cache_mode, kernel, allowed.cache_modes)
    if a.token_x.ndim == 3:
        limits.between("token_x has S", a.token_x.shape[1], kernel, 1, TOKENS)
    for name in FACTORS:
        if (scale := getattr(a, name)) != 1.0:
            raise NoMatch(f"{name} is {scale:.6g}; {kernel} has no such factor, MlaPrologV3 does")
    prolog_form.refuse_sizes(a, allowed, kernel, kernel)
    for name in DENSE:
        limits.dtype(name, getattr(a, name), kernel, (torch.bfloat16,))
    for name in ("kv_cache", "kr_cache"):
        cache: Tensor = getattr(a, name)
        limits.dense(name, cache, kernel)
        limits.page_size(name, cache.shape[1], kernel, allowed.pages)


# --- the call --------------------------------------------------------------------------------------------------------


def prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The results of `mla_fx.mla_prolog`.

    Kernels multiply by gamma before they round, regardless of `gamma_after_cast`. This is one rounding less."""
    call = prolog_form.formed(of_pages(a, *CACHES) if a.cache_mode == "NZ" else a)
    if surface.prolog == "v3":
        query, query_rope, *_, kv_cache, kr_cache = mla_prolog_v3.vendor_call(surface, as_v3(call))
    else:
        query, query_rope, kv_cache, kr_cache = first_prolog(surface, call)
    return query, query_rope, kv_cache.view(a.kv_cache.shape), kr_cache.view(a.kr_cache.shape)


def first_prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """Call one of the first two interfaces. Return query, query_rope, kv_cache and kr_cache."""
    call: dict[str, Any] = {name: value for name, value in vars(a).items() if name not in OWN}
    for name in DENSE:
        call[name] = call[name].contiguous()
    for name in ("weight_dq", "weight_uq_qr", "weight_dkv_kr"):
        call[name] = in_fractals(surface, call[name])
    for name in ("kv_cache", "kr_cache"):
        call[name] = copied(call[name])
    npu = torch.ops.npu
    operator = npu.npu_mla_prolog if surface.prolog == "v1" else npu.npu_mla_prolog_v2
    query, query_rope, kv_cache, kr_cache, *_ = operator(**call)
    return query, query_rope, kv_cache, kr_cache
