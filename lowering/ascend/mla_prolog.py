"""Lowers mla_prolog to the newest interface of the vendor's kernel, MlaPrologV3, or to the first ones if selected.

The kernel gets contiguous caches as pages: T positions are T/BlockSize pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_prolog import check
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments
from mla_fx.ops.vendor.mla_prolog_v3 import arguments as v3
from mla_fx.target import Compiled

from . import first_prologs, limits, mla_prolog_v3
from .mla_prolog_v3 import KERNEL
from .surface import Surface
from .weights import halves_interleaved

OPERATOR = "mla_prolog"
OWN_MODES = ("Norm", "BSND")  # not in the vendor's first interface

PAGE_SIZES = (128, 16)  # attention takes these too; the better one first


def lower(surface: Surface, *args: Any, **kwargs: Any) -> Compiled:
    refuse_unsupported(surface, Arguments(*args, **kwargs))
    return plain(surface)


@functools.cache
def plain(surface: Surface) -> Callable[..., tuple[Tensor, ...]]:
    """Return one function for all calls, so that equal calls are traced once."""
    return lambda *args, **kwargs: prolog(surface, Arguments(*args, **kwargs))


# --- what the kernel cannot do ---------------------------------------------------------------------------------------


def refuse_unsupported(surface: Surface, a: Arguments) -> None:
    refuse_left_out(surface, a)
    refuse_rotations(surface, a)
    refuse_formats(surface, a)
    if a.cache_mode == "Norm":
        refuse_unpaged(surface, a)
    if surface.prolog == "v3":
        mla_prolog_v3.refuse_unsupported(surface, as_v3(paged(a, page_shapes)))
    else:
        first_prologs.refuse_unsupported(surface, paged(a, page_shapes))


def kernel(surface: Surface) -> str:
    return KERNEL if surface.prolog == "v3" else first_prologs.VERSIONS[surface.prolog].kernel


def refuse_left_out(surface: Surface, a: Arguments) -> None:
    if a.weight_dq is None:
        raise NoMatch(f"weight_dq is None; {kernel(surface)} computes the query from a compressed one")
    if a.rope_sin is None:
        raise NoMatch(f"rope_sin and rope_cos are None; {kernel(surface)} always rotates")


def refuse_rotations(surface: Surface, a: Arguments) -> None:
    if a.rope_layout == "interleave_interleave":
        writes = f"{kernel(surface)} writes halves, which reorders kr_cache"
        raise NoMatch(f"rope_layout is {a.rope_layout!r}; {writes}")
    if a.rope_layout == "half_half" and not surface.hoists:
        raise NoMatch(
            f"rope_layout is {a.rope_layout!r}; {kernel(surface)} reads interleaved columns, and this target "
            "does not reorder the columns of weights"
        )


def refuse_formats(surface: Surface, a: Arguments) -> None:
    """Raises NoMatch unless weights are in FRACTAL_NZ. In the vendor's own cache modes the caller is responsible."""
    if a.cache_mode in OWN_MODES and not surface.hoists:
        raise NoMatch(
            f"{kernel(surface)} reads weights in FRACTAL_NZ, and these are not laid out so: a graph pass cannot, "
            "and the backend does with option lay_out"
        )


def refuse_unpaged(surface: Surface, a: Arguments) -> None:
    limits.dense("kv_cache", a.kv_cache, kernel(surface))
    limits.dense("kr_cache", a.kr_cache, kernel(surface))
    positions = a.kv_cache.shape[2]
    if page_size(positions) is None:
        allowed = f"so T must be a multiple of {PAGE_SIZES[-1]}"
        raise NoMatch(f"kv_cache has T = {positions}; {kernel(surface)} writes pages, {allowed}")


def page_size(positions: int | torch.SymInt) -> int | None:
    """The page size that divides this number of positions, if there is one."""
    return next((size for size in PAGE_SIZES if limits.holds(positions % size == 0)), None)


# --- the call --------------------------------------------------------------------------------------------------------


def prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The results of `mla_fx.mla_prolog`."""
    call = replace(
        interleaved(paged(a)),
        cache_index=slots(a) if a.cache_mode == "Norm" else a.cache_index,
        rope_sin=for_each_token(a, a.rope_sin),
        rope_cos=for_each_token(a, a.rope_cos),
    )
    if surface.prolog == "v3":
        query, query_rope, *_, kv_cache, kr_cache = mla_prolog_v3.prolog(surface, as_v3(call))
    else:
        query, query_rope, kv_cache, kr_cache = first_prologs.prolog(surface, call)
    return query, query_rope, kv_cache.view(a.kv_cache.shape), kr_cache.view(a.kr_cache.shape)


def as_v3(a: Arguments) -> v3.Arguments:
    """The same call for the newest interface.

    It multiplies by gamma before it rounds, regardless of `gamma_after_cast`. This is one rounding less."""
    call = check.as_v3(a)
    return call if a.weight_uq_qr.dtype == torch.int8 else replace(call, weight_quant_mode=0)


def interleaved(a: Arguments) -> Arguments:
    """The same call for a kernel that rotates adjacent columns."""
    if a.rope_layout != "half_half":
        return a
    heads, width = a.weight_uk.shape[0], a.kr_cache.shape[-1]
    by_head = a.weight_uq_qr.reshape(a.weight_uq_qr.shape[0], heads, -1)
    return replace(
        a,
        weight_uq_qr=halves_interleaved(by_head, width).flatten(-2),
        weight_dkv_kr=halves_interleaved(a.weight_dkv_kr, width),
        rope_layout="interleave_half",
    )


def paged(a: Arguments, pages: Callable[[Tensor, int], Tensor] | None = None) -> Arguments:
    """The same call with the caches as pages. cache_index still counts within its batch row."""
    if a.cache_mode != "Norm":
        return a
    size = page_size(a.kv_cache.shape[2])
    assert size is not None, "other caches were refused"
    kv_cache, kr_cache = ((pages or as_pages)(cache, size) for cache in (a.kv_cache, a.kr_cache))
    return replace(a, kv_cache=kv_cache, kr_cache=kr_cache, cache_mode="PA_BSND")


def as_pages(cache: Tensor, size: int) -> Tensor:
    """[B, 1, T, D] -> [B*T/size, size, 1, D]."""
    return cache.view(-1, size, 1, cache.shape[-1])


def page_shapes(cache: Tensor, size: int) -> Tensor:
    """A new tensor with the shape of a cache's pages, to check sizes.

    A view of a symbolic length would give the page size as a quotient."""
    batch, _, positions, width = cache.shape
    return cache.new_empty(batch * positions // size, size, 1, width)


def slots(a: Arguments) -> Tensor:
    """cache_index [B, S] of a contiguous cache, counted over all batch rows. A negative one still skips its token."""
    assert a.cache_index is not None, "contiguous caches have an index"
    batch, _, positions, _ = a.kv_cache.shape
    if limits.known_equal(batch, 1):
        return a.cache_index
    first = torch.arange(batch, device=a.cache_index.device).unsqueeze(-1) * positions
    return torch.where(a.cache_index < 0, a.cache_index, a.cache_index + first)


def for_each_token(a: Arguments, table: Tensor | None) -> Tensor:
    assert table is not None, "a call without rotation was refused"
    return table.expand(*a.token_x.shape[:-1], -1)
