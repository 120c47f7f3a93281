"""`python -m tests.npu`, with pytest's arguments: the NPU tests, each file in a process that can import torch_npu."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mla_fx.errors import OptionError
from npu import environment

FILES = sorted(f"tests/npu/{path.name}" for path in Path(__file__).parent.glob("test_*.py"))
NO_TESTS = 5  # what pytest returns where an option like -k leaves none

options = [argument for argument in sys.argv[1:] if not argument.startswith("tests/npu/")]
chosen = [argument for argument in sys.argv[1:] if argument.startswith("tests/npu/")]
try:
    with environment.pytests() as run:
        codes = [run([file, *options]) for file in chosen or FILES]
except OptionError as reason:
    sys.exit(str(reason))
sys.exit(max(code for code in codes if code != NO_TESTS) if set(codes) != {NO_TESTS} else NO_TESTS)
