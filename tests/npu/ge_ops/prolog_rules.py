"""What MlaProlog, MlaPrologV2 and MlaPrologV3 do not allow on Ascend910B, by release: the sizes and modes of their
documents, and of CheckDims, CheckCacheMode and GetQuantizationModeV3 in CANN's tiling."""

from __future__ import annotations

from typing import Any

POWERS = [2**exponent for exponent in range(8)]
PAGES = ["PA_BSND", "PA_NZ"]


def complaints(kernel: str, a: dict[str, Any], release: str) -> list[str]:
    """A sentence for each size or mode. `a` are the inputs by name, weights as matrices, and the attributes."""
    allowed = of_third(release) if kernel == "MlaPrologV3" else of_first(kernel)
    return [
        f"{kernel}: {name} is {value!r}; CANN {release} takes {', '.join(map(str, allowed[name]))}"
        for name, value in found(kernel, a).items()
        if name in allowed and value not in allowed[name]
    ]


def of_first(kernel: str) -> dict[str, Any]:
    return {
        "He": [7168],
        "Hcq": [1536],
        "N": [32, 64, 128] if kernel == "MlaProlog" else POWERS,
        "D": [128],
        "Hckv": [512],
        "Dr": [64],
        "S": range(17),
        "Dtile": [512],
        "BlockSize": [16, 128],
        "cache_mode": PAGES,
    }


def of_third(release: str) -> dict[str, Any]:
    is_first, is_last = release == "8.5.0.alpha001", release == "9.1.0"
    allowed: dict[str, Any] = {
        "He": [6144, 7168, 7680] if is_first else [*range(1024, 8193, 1024), 7680],
        "Hcq": [1536, 2048] if is_last else [1536],
        "N": POWERS,
        "D": [128, 192] if is_last else [128],
        "Hckv": [512],
        "Dr": [64],
        "BlockSize": [16, 128] if is_first else range(16, 1025, 16),
        "cache_mode": PAGES if is_first else [*PAGES, "PA_BLK_BSND", "PA_BLK_NZ", "BSND", "TND"],
        "kinds of quantisation": [(0, 0, 512), (1, 0, 512), (1, 2, 512), (2, 0, 512)],
    }
    if is_first:
        return allowed | {"S": range(17), "query_norm_flag": [False]}
    allowed["kinds of quantisation"] += [(1, 3, 656), (2, 1, 512), (2, 3, 656)]
    if is_last:  # ScatterCacheUnAligned of arch22 does not skip a negative index
        allowed["scales in pages"] = [False]
    return allowed


def found(kernel: str, a: dict[str, Any]) -> dict[str, Any]:
    """The sizes and modes of a call."""
    hidden, query_rank = a["weight_dq"].shape
    heads, nope, rank = a["weight_uk"].shape
    cache, cache_mode = a["kv_cache"], a.get("cache_mode", "PA_BSND")
    is_paged, has_batch = cache_mode.startswith("PA"), a["token_x"].ndim == 3
    modes = a.get("weight_quant_mode", 0), a.get("kv_cache_quant_mode", 0), cache.shape[-1]
    return {
        "He": hidden,
        "Hcq": query_rank,
        "N": heads,
        "D": nope,
        "Hckv": rank,
        "Dr": a["rope_sin"].shape[-1],
        **({"S": a["token_x"].shape[1]} if has_batch else {}),
        "Dtile": cache.shape[-1],
        **({"BlockSize": cache.shape[1]} if is_paged else {}),
        "cache_mode": cache_mode,
        "query_norm_flag": bool(a.get("query_norm_flag", False)),
        **({"kinds of quantisation": modes} if kernel == "MlaPrologV3" else {}),
        "scales in pages": is_paged and modes[1] == 3,
    }
