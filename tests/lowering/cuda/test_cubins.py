"""The Triton kernels compile for each architecture without a device, and nothing spills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cubins.py"


@pytest.mark.slow
def test_nothing_spills(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("0 bytes") == 48
