"""What KvRmsNormRopeCache takes, by release of CANN and by chip.

The source is the public host code of gitcode.com/cann/ops-transformer, in posembedding/kv_rms_norm_rope_cache/op_host,
at the tag of the release. `base`, `ds` and `950` are kv_rms_norm_rope_cache_base_tiling.cpp, its neighbours
.._ds_tiling.cpp and .._regbase_full_load_tiling.cpp, `def` is kv_rms_norm_rope_cache_def.cpp. This code begins with
v8.5.0, so 8.5.0.alpha001 has its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .surface import A2, A3, A5, Release

# In all releases; lines are those of v9.0.0.
RANK = (512,)  # ds 21 and 199, RMS_NORM_LENGTHS
ROPE = (64,)  # ds 23 and 199, ROPE_LENGTH
KEY_WIDTH = (192,)  # with v: ds 21, RMS_NORM_LENGTHS
VALUE_WIDTH = (128,)  # with v: ds 25, V_LENGTH
PAGE_STEP, INT8_PAGE_STEP = 16, 32  # base 216, CheckKCacheValidPA: 32 bytes


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
