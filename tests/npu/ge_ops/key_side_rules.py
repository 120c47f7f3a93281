"""What KvRmsNormRopeCache does not allow on Ascend910B, as errors: GetShapeAttrsInfo and DoOpTiling of its tiling."""

from __future__ import annotations

from typing import Any

from npu.ge_ops import prolog_rules


def check(kernel: str, a: dict[str, Any], release: str | None = None) -> None:
    """Raises ValueError with a sentence. `a` are the inputs by name, and the attributes."""
    release = release or prolog_rules.RELEASE
    _, heads, _, width = a["kv"].shape
    found = {"N": heads, "D": width, "gamma": a["gamma"].shape[0], "Dr": a["cos"].shape[-1]}
    allowed: dict[str, list[int]] = {"N": [1], "D": [576], "gamma": [512], "Dr": [64]}
    if (v := a.get("v")) is not None:
        if release.startswith("8"):
            raise ValueError(f"{kernel}: v is given; in CANN {release} it is no input")
        found["Dv"] = v.shape[-1]
        allowed |= {"N": [1, 2, 4, 8], "D": [192], "gamma": [192], "Dv": [128]}
    wrong = {name: size for name, size in found.items() if size not in allowed[name]}
    if wrong:
        raise ValueError(f"{kernel}: sizes are {wrong}; CANN {release} takes {allowed}")
