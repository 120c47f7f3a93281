"""Runs pytest where torch_npu can be imported, without an NPU: see `lowering/ascend/stub/`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

from mla_fx.lowering.ascend.stub import environment

TESTS = Path(__file__).parents[1]
IMPORTED = ("npu.converted", "npu.models")  # which bring torch_npu, torchair and transformers


@contextlib.contextmanager
def pytests(imported: tuple[str, ...] = IMPORTED) -> Iterator[Callable[..., int]]:
    """A function that runs pytest with a list of arguments and returns its exit code, each time in a fork of one
    process that imported these modules (`forks.py`). What pytest prints goes to the file `output`, if one is named.
    Raises OptionError if this machine cannot import torch_npu."""
    given = {**os.environ, **environment.variables()}
    given["PYTHONPATH"] = os.pathsep.join([str(TESTS), given["PYTHONPATH"]])
    ours, theirs = Pipe()

    def run(arguments: list[str], output: Path | None = None) -> int:
        ours.send((arguments, output))
        return ours.recv()

    command = [sys.executable, "-m", "npu.forks", str(theirs.fileno()), *imported]
    with subprocess.Popen(command, cwd=TESTS.parent, env=given, pass_fds=[theirs.fileno()]):
        theirs.close()
        with ours:
            yield run
