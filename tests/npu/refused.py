"""What releases of CANN refuse of the graphs that tests run, compared with what was accepted in refused.json.

Each line there is a release, an operator and a reason, and names the files whose tests run such graphs.
`MLA_FX_ACCEPT=1 python -m tests.npu --campaign` adds what is missing. To leave out what is gone, delete the file
first."""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = Path(__file__).parent / "refused.json"


def check(file: str, found: set[str]) -> None:
    """Compares what the tests of a file ran with what is accepted, or accepts it."""
    known = accepted()
    unknown = sorted(reason for reason in found if file not in known.get(reason, ()))
    if os.environ.get("MLA_FX_ACCEPT") and unknown:
        known |= {reason: sorted({*known.get(reason, ()), file}) for reason in unknown}
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return
    assert not unknown, f"{file}: run with MLA_FX_ACCEPT=1 if these releases may refuse this: {unknown}"


def accepted() -> dict[str, list[str]]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
