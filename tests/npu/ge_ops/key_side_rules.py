"""What KvRmsNormRopeCache does not allow on Ascend910B, by release: GetShapeAttrsInfo and DoOpTiling of its tiling."""

from __future__ import annotations

from typing import Any


def complaints(kernel: str, a: dict[str, Any], release: str) -> list[str]:
    """A sentence for each size. `a` are the inputs by name, and the attributes."""
    _, heads, _, width = a["kv"].shape
    found = {"N": heads, "D": width, "gamma": a["gamma"].shape[0], "Dr": a["cos"].shape[-1]}
    allowed: dict[str, list[int]] = {"N": [1], "D": [576], "gamma": [512], "Dr": [64]}
    if (v := a.get("v")) is not None:
        if release.startswith("8"):
            return [f"{kernel}: v is given; in CANN {release} it is no input"]
        found["Dv"] = v.shape[-1]
        allowed |= {"N": [1, 2, 4, 8], "D": [192], "gamma": [192], "Dv": [128]}
    return [
        f"{kernel}: {name} is {size}; CANN {release} takes {', '.join(map(str, allowed[name]))}"
        for name, size in found.items()
        if size not in allowed[name]
    ]
