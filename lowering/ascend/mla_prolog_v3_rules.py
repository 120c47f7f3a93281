"""What MlaPrologV3 takes, by release of CANN and by chip.

The source is the public host code, whose failure makes a device refuse the call. `check` is
attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp and `tiling` mla_prolog_tiling.cpp beside it, at the tag or
commit that a table names, with the line. Repositories: gitcode.com/cann/ops-transformer, and its mirror hicann."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .surface import A2, A3, A5, Release

# In all releases: HCKV_SIZE and DR_SIZE, and supportedNSize of CheckDims.
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
