"""Lowers kv_rmsnorm_rope_cache to torch_npu.npu_kv_rmsnorm_rope_cache_v2_functional (KvRmsNormRopeCache in graphs).

That function is for graphs only. Run eagerly, it returns caches to which nothing is written.

The source is the public host code of gitcode.com/cann/ops-transformer, in posembedding/kv_rms_norm_rope_cache/op_host,
at the tag of the release. `base`, `ds` and `950` are kv_rms_norm_rope_cache_base_tiling.cpp, its neighbours
.._ds_tiling.cpp and .._regbase_full_load_tiling.cpp, `def` is kv_rms_norm_rope_cache_def.cpp. This code begins with
v8.5.0, so 8.5.0.alpha001 has its rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.cache import of_pages, page_count, page_shape
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache.arguments import Arguments
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache.check import CONTIGUOUS_MODES, PLAIN_MODES, is_quantised
from mla_fx.ops.emitted.kv_rmsnorm_rope_cache.operator import body
from mla_fx.target import Compiled

from .. import limits
from ..limits import A2, A3, A5, Release, Surface
from ..prolog_form import as_pages, multiple_of, page_shapes, page_size, slots

OPERATOR = "kv_rmsnorm_rope_cache"
KERNEL = "KvRmsNormRopeCache"

CACHES = ("k_cache", "ckv_cache")

# --- what the kernel takes, by release of CANN and by chip --------------------------------------------------------

# In all releases; lines are those of v9.0.0.
RANK = (512,)  # ds 21 and 199, RMS_NORM_LENGTHS
ROPE = (64,)  # ds 23 and 199, ROPE_LENGTH
KEY_WIDTH = (192,)  # with v: ds 21, RMS_NORM_LENGTHS
VALUE_WIDTH = (128,)  # with v: ds 25, V_LENGTH
PAGE_STEP, INT8_PAGE_STEP = 16, 32  # base 216, CheckKCacheValidPA: 32 bytes
INT8_PAGE_SIZES = (128, INT8_PAGE_STEP)  # the better size first


@dataclass(frozen=True)
class Rules:
    heads_with_v: tuple[int, ...]
    """N of a call with v; without any, v is no input."""


# def has no input v, base 278 refuses any N but 1.
LATENTS = Rules(heads_with_v=())
# base 351. On 950, def has the input, but `950` 217 refuses any N but 1.
WITH_V = Rules(heads_with_v=(1, 2, 4, 8))

RULES: Mapping[Release, Mapping[str, Rules]] = {
    "8.5.0.alpha001": {A2: LATENTS, A3: LATENTS, A5: LATENTS},
    "8.5.0": {A2: LATENTS, A3: LATENTS, A5: LATENTS},
    "9.0.0": {A2: WITH_V, A3: WITH_V, A5: LATENTS},
    "9.1.0": {A2: WITH_V, A3: WITH_V, A5: LATENTS},
}


def lower(surface: Surface, a: Arguments) -> Compiled:
    refuse_quantisation(a)
    for name in CACHES:
        limits.dense(name, getattr(a, name), KERNEL)
    if a.cache_mode == "NZ":
        for name in CACHES:
            limits.fractals(name, getattr(a, name), KERNEL)
        a = of_pages(a, *CACHES, form=page_shape)
    refuse_unsupported(surface, paged(a, page_shapes) if is_unpaged(a) else a)
    return plain


# --- what the kernel cannot do ------------------------------------------------------------------------------------


def refuse_unsupported(surface: Surface, a: Arguments) -> None:
    refuse_rotation(a)
    if a.kc_scale != 1.0:
        raise NoMatch(f"kc_scale is {a.kc_scale:.6g}; {KERNEL} stores norms as they are")
    limits.dtype("kv", a.kv, KERNEL, limits.HALVES)
    for name in ("gamma", "cos", "sin"):
        limits.dtype(name, getattr(a, name), KERNEL, (a.kv.dtype,))
    rules = limits.rules(surface, KERNEL, RULES)
    if a.v is None:
        refuse_latent_sizes(a)
    elif rules.heads_with_v:
        refuse_key_sizes(a, a.v, rules.heads_with_v)
    else:
        raise NoMatch(f"v is given; {limits.of_release(surface, KERNEL)} takes none on {surface.chip}")
    if a.cache_mode not in CONTIGUOUS_MODES:
        refuse_pages(a)


def refuse_quantisation(a: Arguments) -> None:
    if a.rounds_first:
        raise NoMatch(f"rounds_first is True; {KERNEL} quantises unrounded values")
    if a.gamma_after_cast and a.c_kv_scale is not None:
        raise NoMatch(f"gamma_after_cast is True; {KERNEL} quantises latents that are not rounded before gamma")
    if a.cache_mode not in CONTIGUOUS_MODES or not is_quantised(a):
        return
    if a.cache_mode == "BNSD" or a.v is not None:
        form = f"cache_mode {a.cache_mode!r}" if a.v is None else f"cache_mode {a.cache_mode!r} with v"
        raise NoMatch(f"a cache is int8 in {form}; {KERNEL} takes int8 in pages only")
    positions = a.ckv_cache.shape[2]
    if page_size(positions, INT8_PAGE_SIZES) is None:
        allowed = multiple_of(INT8_PAGE_SIZES[-1], positions)
        raise NoMatch(f"ckv_cache has T = {positions}; {KERNEL} writes int8 in pages, {allowed}")


def refuse_rotation(a: Arguments) -> None:
    if a.cos is None:
        raise NoMatch(f"cos and sin are None; {KERNEL} always rotates")
    if a.rope_layout != "interleave_half" and not is_turned(a):
        takes = f"{KERNEL} reads interleaved columns and writes halves, 'interleave_half'"
        raise NoMatch(f"rope_layout is {a.rope_layout!r}; {takes}")


def is_turned(a: Arguments) -> bool:
    """Whether the columns of keys of heads are put in the order that the kernel reads. Unlike those of latents, they
    lie in front, so that they are few in a copy that is made anyway."""
    return a.v is not None and a.rope_layout == "half_half"


def refuse_latent_sizes(a: Arguments) -> None:
    rank = a.gamma.shape[0]
    limits.size("gamma has Hckv", rank, KERNEL, RANK)
    limits.size("kv has Dr", a.kv.shape[-1] - rank, KERNEL, ROPE)


def refuse_key_sizes(a: Arguments, v: Tensor, heads: Sequence[int]) -> None:
    assert a.cos is not None, "a call without rotation was refused"
    limits.size("kv has N", a.kv.shape[1], f"{KERNEL} with v", heads)
    limits.size("kv has Dk", a.kv.shape[-1], f"{KERNEL} with v", KEY_WIDTH)
    limits.size("cos has Dr", a.cos.shape[-1], f"{KERNEL} with v", ROPE)
    limits.size("v has Dv", v.shape[-1], f"{KERNEL} with v", VALUE_WIDTH)


def refuse_pages(a: Arguments) -> None:
    blocks, size = a.k_cache.shape[:2]
    if a.cache_mode not in PLAIN_MODES or is_quantised(a):
        step = INT8_PAGE_STEP if is_quantised(a) else PAGE_STEP
        if not limits.holds(size % step == 0):
            allowed = f"multiples of {step} in cache_mode {a.cache_mode!r}"
            raise NoMatch(f"k_cache has BlockSize = {size}; {KERNEL} takes {allowed}")
    needed = a.kv.shape[0] * page_count(a.kv.shape[2], size)
    if statically_known_true(blocks < needed):
        raise NoMatch(f"k_cache has BlockNum = {blocks}; {KERNEL} takes B*Ceil(S/BlockSize) = {needed} or more")


# --- the call -----------------------------------------------------------------------------------------------------


def plain(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    if a.cache_mode == "NZ":
        k_cache, ckv_cache, *rows = vendor_call(of_pages(a, *CACHES))
    elif is_unpaged(a):
        k_cache, ckv_cache, *rows = vendor_call(formed(a))
    else:
        return vendor_call(a)
    return k_cache.view(a.k_cache.shape), ckv_cache.view(a.ckv_cache.shape), *rows


def is_unpaged(a: Arguments) -> bool:
    """Whether a cache is int8 and contiguous. The kernel takes it as pages."""
    return is_quantised(a) and a.cache_mode == "Norm"


def formed(a: Arguments) -> Arguments:
    """Give a call pages, slots [B*S], and tables for each token."""
    batch, _, tokens, _ = a.kv.shape
    cos, sin = (None if table is None else table.expand(batch, -1, tokens, -1) for table in (a.cos, a.sin))
    index = slots(a.index, a.ckv_cache).expand(batch, -1).flatten()
    return replace(paged(a), index=index, cos=cos, sin=sin)


def paged(a: Arguments, pages: Callable[[Tensor, int], Tensor] = as_pages) -> Arguments:
    """Make both caches of a call pages of one size. index still counts within its batch row."""
    size = page_size(a.ckv_cache.shape[2], INT8_PAGE_SIZES)
    assert size is not None, "other caches were refused"
    return replace(a, k_cache=pages(a.k_cache, size), ckv_cache=pages(a.ckv_cache, size), cache_mode="PA")


def vendor_call(a: Arguments) -> tuple[Tensor, ...]:
    """The same for a call in a form that the kernel takes."""
    batch, paged = a.kv.shape[0], a.cache_mode not in CONTIGUOUS_MODES
    kv, gamma = (interleaved(a, rows) if is_turned(a) else rows for rows in (a.kv, a.gamma))
    k_rope, c_kv, k_cache, ckv_cache = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv.contiguous(),
        gamma.contiguous(),
        for_each_sequence(a.cos, batch),
        for_each_sequence(a.sin, batch),
        (positions(a) if paged else positions(a).expand(batch, -1)).contiguous(),
        a.k_cache,
        a.ckv_cache,
        k_rope_scale=a.k_rope_scale,
        c_kv_scale=a.c_kv_scale,
        k_rope_offset=a.k_rope_offset,
        c_kv_offset=a.c_kv_offset,
        v=None if a.v is None else a.v.contiguous(),
        epsilon=a.epsilon,
        cache_mode=a.cache_mode if paged else "Norm",
        is_output_kv=paged,
    )
    if not paged:
        # the kernel leaves these undefined; if unread, they are dead code
        *_, k_rope, c_kv = body(replace(a, gamma_after_cast=False))
    return k_cache, ckv_cache, k_rope, c_kv


def interleaved(a: Arguments, rows: Tensor) -> Tensor:
    """Rows whose first columns, two halves, alternate between both."""
    assert a.cos is not None, "a call without rotation was refused"
    halves, rest = rows[..., : a.cos.shape[-1]], rows[..., a.cos.shape[-1] :]
    return torch.cat((torch.unflatten(halves, -1, (2, -1)).mT.flatten(-2), rest), -1)


def positions(a: Arguments) -> Tensor:
    """The positions of the rows. Without an index the rows are the whole new cache, in order."""
    return torch.arange(a.kv.shape[2], device=a.kv.device).unsqueeze(0) if a.index is None else a.index


def for_each_sequence(table: Tensor | None, batch: int) -> Tensor:
    assert table is not None, "a call without rotation was refused"
    return table.expand(batch, -1, -1, -1).contiguous()
