"""Brings a prolog call into the form that kernels take: pages, adjacent pairs, tables for each token, weights laid out.

Calls of mla_prolog and of mla_prolog_v3 have these arguments in common. Contiguous caches become pages: T positions are
T/BlockSize of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.emitted.mla_prolog.arguments import Arguments, V3Arguments

from . import limits
from .limits import Surface

PAGE_SIZES = (128, 16)  # attention takes these too; the better one first
FRACTAL_NZ = 29
A = TypeVar("A", Arguments, V3Arguments)

# In all releases: HCKV_SIZE and DR_SIZE, and supportedNSize of CheckDims in mla_prolog_tiling_check.cpp.
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
RANK, ROPE = (512,), (64,)


@dataclass(frozen=True, kw_only=True)
class CommonRules:
    """What a prolog takes of any interface."""

    hidden: tuple[int, ...]
    query_ranks: tuple[int, ...]
    nope: tuple[int, ...]
    heads: tuple[int, ...] = HEADS
    pages: tuple[int, ...] | range
    cache_modes: tuple[str, ...]


# --- what kernels cannot do ------------------------------------------------------------------------------------------


def refuse_sizes(a: Arguments | V3Arguments, allowed: CommonRules, kernel: str, of_release: str) -> None:
    """Check the sizes of the weights, which are numbers even where those of activations are symbols."""
    assert a.weight_dq is not None, "a query of full rank was refused"
    limits.size("weight_dq has He", a.weight_dq.shape[0], of_release, allowed.hidden)
    limits.size("weight_dq has Hcq", a.weight_dq.shape[1], of_release, allowed.query_ranks)
    heads, nope, rank = a.weight_uk.shape
    limits.size("weight_uk has N", heads, kernel, allowed.heads)
    limits.size("weight_uk has D", nope, of_release, allowed.nope)
    limits.size("weight_uk has Hckv", rank, kernel, RANK)
    limits.size("weight_dkv_kr has Dr", a.weight_dkv_kr.shape[1] - rank, kernel, ROPE)


def refuse_rotations(surface: Surface, a: Arguments | V3Arguments, kernel: str) -> None:
    if a.rope_layout == "interleave_interleave":
        raise NoMatch(f"rope_layout is {a.rope_layout!r}; {kernel} writes halves, which reorders kr_cache")
    if a.rope_layout == "half_half" and not surface.hoists:
        raise NoMatch(
            f"rope_layout is {a.rope_layout!r}; {kernel} reads interleaved columns, and this target "
            "does not reorder the columns of weights"
        )


def refuse_formats(surface: Surface, kernel: str) -> None:
    """Raises NoMatch unless weights are in FRACTAL_NZ. In the vendor's own cache modes the caller is responsible."""
    if not surface.hoists:
        raise NoMatch(
            f"{kernel} reads weights in FRACTAL_NZ, and these are not laid out so: a graph pass cannot, "
            "and the backend does with option lay_out"
        )


def refuse_unpaged(a: Arguments | V3Arguments, kernel: str) -> None:
    limits.dense("kv_cache", a.kv_cache, kernel)
    limits.dense("kr_cache", a.kr_cache, kernel)
    positions = a.kv_cache.shape[2]
    if page_size(positions) is None:
        raise NoMatch(f"kv_cache has T = {positions}; {kernel} writes pages, {multiple_of(PAGE_SIZES[-1], positions)}")


def multiple_of(size: int, positions: int | torch.SymInt) -> str:
    """What the length of a cache must be, and the next one that is."""
    advice = f": make the cache {-(-positions // size) * size} tokens long" if isinstance(positions, int) else ""
    return f"so T must be a multiple of {size}{advice}"


def page_size(positions: int | torch.SymInt, sizes: Sequence[int] = PAGE_SIZES) -> int | None:
    """The page size that divides this number of positions, if there is one."""
    return next((size for size in sizes if limits.holds(positions % size == 0)), None)


# --- the form --------------------------------------------------------------------------------------------------------


def formed(a: A) -> A:
    """Give a call pages, adjacent pairs, and tables for each token."""
    return replace(
        interleaved(paged(a)),
        cache_index=slots(a.cache_index, a.kv_cache) if a.cache_mode == "Norm" else a.cache_index,
        rope_sin=for_each_token(a, a.rope_sin),
        rope_cos=for_each_token(a, a.rope_cos),
    )


def interleaved(a: A) -> A:
    """Order the columns of a call for a kernel that rotates adjacent ones."""
    if a.rope_layout != "half_half":
        return a
    heads, width = a.weight_uk.shape[0], a.weight_dkv_kr.shape[1] - a.weight_uk.shape[2]

    def of_heads(weight: Tensor) -> Tensor:
        return halves_interleaved(weight.reshape(weight.shape[0], heads, -1), width).flatten(-2)

    scales: dict[str, Any] = {"weight_uq_qr": of_heads(a.weight_uq_qr)}
    if a.dequant_scale_w_uq_qr is not None:
        scales["dequant_scale_w_uq_qr"] = of_heads(a.dequant_scale_w_uq_qr)
    if a.dequant_scale_w_dkv_kr is not None:
        scales["dequant_scale_w_dkv_kr"] = halves_interleaved(a.dequant_scale_w_dkv_kr, width)
    return replace(
        a, **scales, weight_dkv_kr=halves_interleaved(a.weight_dkv_kr, width), rope_layout="interleave_half"
    )


def paged(a: A, pages: Callable[[Tensor, int], Tensor] | None = None) -> A:
    """Make the caches of a call pages. cache_index still counts within its batch row. The empty kr_cache of
    packed rows stays as it is."""
    if a.cache_mode != "Norm":
        return a
    size = page_size(a.kv_cache.shape[2])
    assert size is not None, "other caches were refused"
    form = pages or as_pages
    kr_cache = form(a.kr_cache, size) if a.kr_cache.ndim == 4 else a.kr_cache
    return replace(a, kv_cache=form(a.kv_cache, size), kr_cache=kr_cache, cache_mode="PA_BSND")


def as_pages(cache: Tensor, size: int) -> Tensor:
    """[B, 1, T, D] -> [B*T/size, size, 1, D]."""
    return cache.view(-1, size, 1, cache.shape[-1])


def page_shapes(cache: Tensor, size: int) -> Tensor:
    """A new tensor with the shape of a cache's pages, to check sizes.

    A view of a symbolic length would give the page size as a quotient."""
    batch, _, positions, width = cache.shape
    return cache.new_empty(batch * positions // size, size, 1, width)


def slots(index: Tensor | None, cache: Tensor) -> Tensor:
    """The index [B or 1, S] of a contiguous cache, counted over all its batch rows. A negative one still skips its
    token."""
    assert index is not None, "contiguous caches have an index"
    batch, _, positions, _ = cache.shape
    if limits.known_equal(batch, 1):
        return index
    first = torch.arange(batch, device=index.device).unsqueeze(-1) * positions
    return torch.where(index < 0, index, index + first)


def for_each_token(a: Arguments | V3Arguments, table: Tensor | None) -> Tensor:
    assert table is not None, "a call without rotation was refused"
    return table.expand(*a.token_x.shape[:-1], -1)


# --- weights ---------------------------------------------------------------------------------------------------------


def in_fractals(surface: Surface, weight: Tensor) -> Tensor:
    """A weight in FRACTAL_NZ if the cast is hoisted and costs nothing. Otherwise the user must have cast it.

    `torch.ops.npu.npu_format_cast` is the same operator, but without a fake kernel, so it cannot be traced.
    """
    weight = weight.contiguous()
    if not surface.hoists:
        return weight
    cast: Tensor = torch.ops.npu._npu_format_cast(weight, FRACTAL_NZ)
    return cast


def halves_interleaved(weight: Tensor, width: int) -> Tensor:
    """Reorder the last `width` columns of each row: column i of one half becomes adjacent to column i of the other.

    A kernel that rotates adjacent columns then rotates the original halves."""
    kept, rotated = weight[..., :-width], weight[..., -width:]
    pairs = rotated.reshape(*weight.shape[:-1], 2, width // 2).transpose(-1, -2).flatten(-2)
    return torch.cat((kept, pairs), -1)
