"""The releases of CANN by which operators are checked: which of them refuse a call, and why."""

from __future__ import annotations

from typing import Any

from npu.ge_ops import attention_rules, key_side_rules, prolog_rules

RELEASES = ("8.5.0.alpha001", "8.5.0", "9.0.0", "9.1.0")
OLDEST, *_, NEWEST, BRANCH = RELEASES  # the last one is not out yet
RELEASE = "8.5.0"  # which a graph is made for: as the stub libraries call themselves
RULES = {
    "MlaProlog": prolog_rules,
    "MlaPrologV2": prolog_rules,
    "MlaPrologV3": prolog_rules,
    "KvRmsNormRopeCache": key_side_rules,
    "FusedInferAttentionScore": attention_rules,
}

refused: set[str] = set()
"""What was checked since the test began and is refused by another release: the release, the operator and the reason."""


def refusals(kernel: str, call: dict[str, Any]) -> dict[str, list[str]]:
    """The sentences of each release that refuses a call: `call` has inputs and attributes by name."""
    found = {release: RULES[kernel].complaints(kernel, call, release) for release in RELEASES}
    return {release: complaints for release, complaints in found.items() if complaints}


def check(kernel: str, call: dict[str, Any]) -> None:
    """Raises ValueError if RELEASE refuses a call, or if the oldest release and the newest ones all do."""
    found = refusals(kernel, call)
    if RELEASE in found:
        raise ValueError(found[RELEASE][0])
    if found.keys() >= {OLDEST, NEWEST, BRANCH}:
        raise ValueError(f"neither the oldest nor the newest releases take this call: {found[NEWEST][0]}")
    for release, complaints in found.items():
        refused.update(f"{release}: {complaint.partition(';')[0]}" for complaint in complaints)
