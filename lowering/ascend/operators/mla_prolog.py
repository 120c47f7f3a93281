"""Lowers mla_prolog to the newest interface of the vendor's kernel, MlaPrologV3, or to the first ones if selected."""

from __future__ import annotations

from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.cache import of_pages, page_shape
from mla_fx.ops.emitted.mla_prolog import check
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments
from mla_fx.target import Compiled

from .. import first_prologs, limits, prolog_form
from ..surface import Surface
from . import mla_prolog_v3
from .mla_prolog_v3 import KERNEL

OPERATOR = "mla_prolog"
CACHES = ("kv_cache", "kr_cache")
OWN_MODES = ("Norm", "BSND", "NZ")  # not in the vendor's first interface


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
        mla_prolog_v3.refuse_unsupported(surface, check.as_v3(paged))
    else:
        first_prologs.refuse_unsupported(surface, paged)
    return prolog


def kernel(surface: Surface) -> str:
    return KERNEL if surface.prolog == "v3" else first_prologs.VERSIONS[surface.prolog][0]


def refuse_left_out(surface: Surface, a: Arguments) -> None:
    if a.weight_dq is None:
        raise NoMatch(f"weight_dq is None; {kernel(surface)} computes the query from a compressed one")
    if a.rope_sin is None:
        raise NoMatch(f"rope_sin and rope_cos are None; {kernel(surface)} always rotates")


# --- the call --------------------------------------------------------------------------------------------------------


def prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The results of `mla_fx.mla_prolog`.

    Kernels multiply by gamma before they round, regardless of `gamma_after_cast`. This is one rounding less."""
    call = prolog_form.formed(of_pages(a, *CACHES) if a.cache_mode == "NZ" else a)
    if surface.prolog == "v3":
        query, query_rope, *_, kv_cache, kr_cache = mla_prolog_v3.vendor_call(surface, check.as_v3(call))
    else:
        query, query_rope, kv_cache, kr_cache = first_prologs.prolog(surface, call)
    return query, query_rope, kv_cache.view(a.kv_cache.shape), kr_cache.view(a.kr_cache.shape)
