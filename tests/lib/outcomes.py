"""What fused in a test and why the rest did not, compared with what was accepted in outcomes.json.

Near twins of a layer must give the right answer, fused or not. Without the outcome, their tests would stay green when a
layer is refused for another reason. `MLA_FX_ACCEPT=1 python -m pytest --slow --campaign FILES` writes the file, in one
process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mla_fx import Report

FILE = Path(__file__).parent / "outcomes.json"


def summary(report: Report) -> dict[str, Any]:
    """What fused, and the reasons without names of nodes and symbols, which depend on the trace."""
    reasons = {f"{miss.pattern}: {re.sub(r'_[0-9]+', '', miss.reason)}" for miss in report.misses}
    return {"fused": dict(sorted(report.fused.items())), "reasons": sorted(reasons)}


def check(test: str, report: Report) -> None:
    """Compares a test's outcome with the accepted one, or accepts it."""
    found = summary(report)
    if os.environ.get("MLA_FX_ACCEPT"):
        FILE.write_text(json.dumps(accepted() | {test: found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert found == accepted().get(test), f"{test}: run with MLA_FX_ACCEPT=1 if this is right"


def accepted() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
