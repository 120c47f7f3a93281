"""Lowers mla_prolog_v3 to torch_npu.npu_mla_prolog_v3_functional, which is MlaPrologV3 in graphs.

The source is the public host code, whose failure makes a device refuse the call. `check` is
attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp and `tiling` mla_prolog_tiling.cpp beside it, at the tag or
commit that a table names, with the line. Repositories: gitcode.com/cann/ops-transformer, and its mirror hicann."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.mla_prolog.arguments import V3Arguments as Arguments
from mla_fx.target import Compiled

from .. import limits, prolog_form
from ..fused_infer_attention_score import as_tensor
from ..limits import A2, A3, A5, Release, Surface
from ..prolog_form import CommonRules, in_fractals

OPERATOR = "mla_prolog_v3"
KERNEL = "MlaPrologV3"

PER_TILE = 3  # kv_cache_quant_mode of packed rows, which have no kr_cache

OWN = ("rope_layout", "gamma_after_cast")  # not in the vendor's interface
# Arguments that torch_npu takes by keyword only.
OPTIONS = tuple(name for name in list(Arguments.__dataclass_fields__)[11:] if name not in OWN)


# --- what the kernel takes, by release of CANN and by chip -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rules(CommonRules):
    tokens: int | None
    """The largest S of token_x [B, S, He], or None. [T, He] has no such limit; longer calls are passed so."""
    weight_quant_modes: tuple[int, ...]
    cache_quant_modes: tuple[int, ...]
    query_norm_flags: tuple[bool, ...]
    misplaces_scales: bool = False
    """Whether the scales of a packed row that has no slot are written before the first page."""


# Commit c29bc106 of 2025-11-15, before the first tag; its version.info has this name. torch_npu 2.13 documents these
# sizes and cache modes for npu_mla_prolog_v3.
FIRST = Rules(
    hidden=(6144, 7168, 7680),  # check 67, CheckDims
    query_ranks=(1536,),  # check 72, and HCQ_SIZE in its header
    nope=(128,),  # check 85, and D_SIZE
    tokens=16,  # check 63, and MAX_S1_SIZE; SetShapeInfo, tiling 105, reads no S from [T, He]
    pages=(16, 128),  # check 97
    cache_modes=("PA_BSND", "PA_NZ"),  # check 472, CheckCacheMode
    weight_quant_modes=(0, 1, 2),  # tiling 79: read off the dtypes
    # Not 1: check 284 wants quant_scale_ckv [1, Hckv], newer releases [1]. Not 3: check 81 wants rows of 512 columns.
    cache_quant_modes=(0, 2),
    query_norm_flags=(False,),  # attention/mla_prolog_v3/docs/aclnnMlaPrologV3WeightNz.md 163: reserved
)

# Tag v8.5.0.
PAGED = Rules(
    hidden=(1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192),  # check 204, CheckDims
    query_ranks=(1536,),  # check 210
    nope=(128,),  # check 223
    tokens=None,  # CheckDims has no limit
    pages=range(16, 1025, 16),  # check 236
    cache_modes=("PA_BSND", "PA_NZ", "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND"),  # check 943, CheckCacheMode
    weight_quant_modes=(0, 1, 2),  # tiling 94, GetQuantizationModeV3
    cache_quant_modes=(0, 1, 2, 3),  # the same
    query_norm_flags=(False, True),  # check 391
)

# Tag v9.0.0. Its document has the query ranks and nope sizes of 9.1.0; CheckDims refuses them, also in v9.0.1.
ON_950 = replace(
    PAGED,
    hidden=(7168,),  # check 201
    cache_modes=("PA_BSND", "PA_NZ"),  # check 1005
    weight_quant_modes=(0,),  # check 93; the other one, 3, is mxfp8
)

# Branch 9.1.0, commit 06be6c2c of 2026-07-21, on all chips.
WIDE_ON_950 = replace(
    PAGED,
    query_ranks=(1536, 2048),  # check 283, CheckHcqSize
    nope=(128, 192),  # check 299, CheckDSize
)
# ScatterCacheUnAligned of ../op_kernel/arch22/service_scatter_cache.h, 48: it skips a negative index in NZ alone.
WIDE = replace(WIDE_ON_950, misplaces_scales=True)

RULES: Mapping[Release, Mapping[str, Rules]] = {
    "8.5.0.alpha001": {A2: FIRST, A3: FIRST},
    "8.5.0": {A2: PAGED, A3: PAGED},  # on 950 it takes mxfp8 alone: tiling 127, GetQuantizationModeV3Mxfp8
    "9.0.0": {A2: PAGED, A3: PAGED, A5: ON_950},
    "9.1.0": {A2: WIDE, A3: WIDE, A5: WIDE_ON_950},
}


# --- what the kernel cannot do ---------------------------------------------------------------------------------------


def lower(surface: Surface, a: Arguments) -> Compiled:
    if surface.prolog != "v3":
        chosen = f"{surface.prolog} here, by its version or by option prolog"
        raise NoMatch(f"the prolog of torch_npu is {chosen}; {KERNEL} is v3")
    prolog_form.refuse_rotations(surface, a, KERNEL)
    if a.cache_mode == "Norm":
        prolog_form.refuse_formats(surface, KERNEL)
        prolog_form.refuse_unpaged(a, KERNEL)
    refuse_unsupported(surface, prolog_form.paged(a, prolog_form.page_shapes))
    return prolog


def refuse_unsupported(surface: Surface, a: Arguments) -> None:
    """Raises NoMatch unless the kernel takes this call. The operator has already checked how its arguments combine."""
    rules = limits.rules(surface, KERNEL, RULES)
    kernel = limits.of_release(surface, KERNEL)
    prolog_form.refuse_sizes(a, rules, KERNEL, kernel)
    refuse_modes(a, kernel, rules)
    for name in ("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos"):
        limits.dtype(name, getattr(a, name), KERNEL, (torch.bfloat16,))
    refuse_caches(a, kernel, rules)


def refuse_modes(a: Arguments, kernel: str, rules: Rules) -> None:
    allowed = {
        "cache_mode": rules.cache_modes,
        "weight_quant_mode": rules.weight_quant_modes,
        "kv_cache_quant_mode": rules.cache_quant_modes,
        "query_norm_flag": rules.query_norm_flags,
    }
    for name, values in allowed.items():
        limits.choice(name, getattr(a, name), kernel, values)


def refuse_caches(a: Arguments, kernel: str, rules: Rules) -> None:
    if rules.misplaces_scales and a.kv_cache_quant_mode == PER_TILE and a.cache_mode.startswith("PA"):
        misplaced = "the scales of a token without a slot before the first page"
        raise NoMatch(f"kv_cache_quant_mode is {PER_TILE}; {kernel} writes {misplaced}")
    names = ("kv_cache",) if a.kv_cache_quant_mode == PER_TILE else ("kv_cache", "kr_cache")
    for name in names:
        cache: Tensor = getattr(a, name)
        limits.dense(name, cache, KERNEL, first=1)
        if a.cache_mode.startswith("PA"):
            limits.page_size(name, cache.shape[1], kernel, rules.pages)


# --- the call --------------------------------------------------------------------------------------------------------


def prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The results of `mla_fx.mla_prolog_v3`.

    The kernel multiplies by gamma before it rounds, regardless of `gamma_after_cast`. This is one rounding less."""
    *others, kv_cache, kr_cache = vendor_call(surface, prolog_form.formed(a))
    return *others, kv_cache.view(a.kv_cache.shape), kr_cache.view(a.kr_cache.shape)


def is_long(surface: Surface, a: Arguments) -> bool:
    """Whether each sequence may have more tokens than the kernel takes of one."""
    most = limits.rules(surface, KERNEL, RULES).tokens
    return most is not None and a.token_x.ndim == 3 and not statically_known_true(a.token_x.shape[1] <= most)


def one_by_one(a: Arguments) -> Arguments:
    """Make the tokens of a call [T, He], in any number. Slots count through all pages anyway."""
    assert a.cache_index is not None and a.cache_mode.startswith("PA"), "other cache modes were refused"
    names = ("token_x", "rope_sin", "rope_cos", "cache_index")
    return replace(a, **{name: getattr(a, name).flatten(0, 1) for name in names})


def vendor_call(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The same for a call in the vendor's own form."""
    if is_long(surface, a):
        query, query_rope, query_scale, query_norm, *others = vendor_call(surface, one_by_one(a))
        lead = a.token_x.shape[:2]
        query, query_rope = (part.view(*lead, *part.shape[1:]) for part in (query, query_rope))
        query_norm = query_norm.view(*lead, -1) if a.query_norm_flag else query_norm
        return query, query_rope, query_scale, query_norm, *others
    dense = (a.rmsnorm_gamma_cq, a.rmsnorm_gamma_ckv, a.rope_sin, a.rope_cos)
    ends = None if a.actual_seq_len is None else as_tensor(a.actual_seq_len, torch.int32, a.token_x.device)
    query, query_rope, query_scale, query_norm, norm_scale, kv_cache, kr_cache = (
        torch.ops.npu.npu_mla_prolog_v3_functional(
            a.token_x.contiguous(),
            in_fractals(surface, a.weight_dq),
            in_fractals(surface, a.weight_uq_qr),
            a.weight_uk.contiguous(),
            in_fractals(surface, a.weight_dkv_kr),
            *(tensor.contiguous() for tensor in dense),
            a.kv_cache,
            a.kr_cache,
            **{name: getattr(a, name) for name in OPTIONS} | {"actual_seq_len": ends},
        )
    )
    # results that a mode does not have are [1] up to CANN 8.5, and [0] in later versions
    query_scale = query_scale if a.kv_cache_quant_mode == 1 else query_scale[:0]
    query_norm = query_norm if a.query_norm_flag else query_norm[:0]
    norm_scale = norm_scale if a.query_norm_flag and a.weight_quant_mode > 0 else norm_scale[:0]
    return query, query_rope, query_scale, query_norm, norm_scale, kv_cache, kr_cache
