"""Runs pytest again and again, each time in a fork of this process, which has imported what the NPU tests need.

torchair keeps what it registers, so that files share no process. But importing it takes longer than most of them."""

import gc
import importlib
import os
import sys
from multiprocessing.connection import Connection

import pytest

OPTIONS = ("-p", "no:cacheprovider", "-o", "testpaths=tests/npu")


def exit_code(arguments, output):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if output is not None:
        with open(output, "wb") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(pytest.main([*OPTIONS, *arguments]))


def main(place, *imported):
    for module in imported:
        importlib.import_module(module)
    gc.freeze()  # else collecting copies the pages that forks share
    requests = Connection(int(place))
    while True:
        try:
            requests.send(exit_code(*requests.recv()))
        except EOFError:
            gc.unfreeze()  # Triton complains of what is left when Python ends
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
