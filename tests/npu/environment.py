"""Runs pytest in a child process that can import torch_npu without an NPU: see `lowering/ascend/stub/`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_fx.lowering.ascend.stub import environment

REPOSITORY = Path(__file__).parents[2]


def pytest(arguments: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Runs pytest with these arguments in such a process. Raises OptionError if there can be none."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "testpaths=tests/npu", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **environment.variables()}, text=True, **options)
