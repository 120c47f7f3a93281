"""What FusedInferAttentionScore takes, by release of CANN, on Ascend910B and Ascend910_93.

The source is the public host code of gitcode.com/cann/ops-transformer, in attention/. `feature` is
fused_infer_attention_score_tiling_check_feature.cpp in fused_infer_attention_score/op_host (in v8.5.0 and v9.0.0 in its
arch32, in 9.1.0 in its arch22), `pfa` is prompt_flash_attention_tiling.cpp in prompt_flash_attention/op_host. Lines are
those of v8.5.0, or of the tag or commit that is named. `document` is that of npu_fused_infer_attention_score_v2 in
torch_npu 2.13; where it is narrower than the host code, it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .surface import A2, A3, Release

CHIPS = (A2, A3)

# --- in all releases -------------------------------------------------------------------------------------------------

LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # feature 82; commit c29bc106: feature 62
RANK, ROPE = 512, 64  # feature 30 and 36
# Per sequence: document. Commit c29bc106, feature 406, refuses more; later host code does not.
LATENT_TOKENS = 16
# Over expanded keys, which lie in the layout TND, nothing is captured: document; pfa 3578 and 4134; c29bc106: pfa 3690
# and 4270. From v8.5.0, the host code checks calls with a rotary part by `feature` instead, which does not mind.
EXPANDED = 128  # columns of a head's nope part, and of its values: feature 30
# Columns of a head's queries -> of its values: pfa 3681.
EXPANDED_UNROTATED = {128: (128,), 192: (128, 192)}
CAUSAL = 3  # the sparse mode in which the last row sees all keys, and each row before it one less: feature 206
CAUSAL_SIZE = 2048  # of the mask that CAUSAL takes, for any lengths: OPT_ATTEN_MASK_LEN

# Keys and values of heads, in pages, for one query row: document. v9.0.0: feature 105, and up to 1024 for 64 and 128.
HEAD_SIZES = tuple(range(16, 257, 16))
HEAD_PAGES = range(16, 513, 16)
# The same in int8, with scales for each column: document; commit c29bc106: CheckInputQKVTypeMatch of
# incre_flash_attention, and fused_infer_attention_score_tiling.cpp 667, which wants it of several query rows only.
CODED_HEAD_SIZES = tuple(range(32, 257, 32))
CODED_PAGE_SIZES = (128, 32)  # the better one first; the smaller divides all
GROUP = 64  # heads of queries for each of keys, at most
MOST_HEADS = 256  # of queries
MOST_COLUMNS = 65535  # of all heads in a row of a page


# --- by release ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What latents in pages may be."""

    pages: tuple[int, ...] | range
    nz_pages: tuple[int, ...] | range
    """In FRACTAL_NZ."""
    layouts: tuple[str, ...]
    nz_layouts: tuple[str, ...]


# Commit c29bc106 of 2025-11-15, as in mla_prolog_v3_rules.
FIRST = Rules(
    pages=(16, 128),  # feature 192
    nz_pages=(128,),  # feature 177
    layouts=("BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"),  # feature 102
    nz_layouts=("BSH", "BSND", "TND", "BSH_NBSD", "BSND_NBSD", "TND_NTD"),  # feature 111
)

# Tag v8.5.0, whose document says up to 512; v9.0.0: feature 79; branch 9.1.0, commit 06be6c2c: feature 70.
PAGED = replace(FIRST, pages=range(16, 1025, 16), nz_pages=range(16, 1025, 16), nz_layouts=FIRST.layouts)

RULES: Mapping[Release, Rules] = {"8.5.0.alpha001": FIRST, "8.5.0": PAGED, "9.0.0": PAGED, "9.1.0": PAGED}
