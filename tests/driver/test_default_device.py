"""Where new tensors are the user's default device's, those of the compiler are not."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from dataclasses import replace

import torch
from lib.comparing import check_same, with_backend
from lib.zoo.entries import DEFAULT, Entry
from lib.zoo.sizes import DECODE

import mla_fx

entry = Entry(replace(DEFAULT, attend="by_hand"))
layer, given = entry.build(), entry.arguments(DECODE)
{ask}
with torch.no_grad():
    check_same(layer, given, with_backend(layer))
report = mla_fx.last_report()
assert report.fused == {{"mla_prolog": 1, "latent_attention": 1}} and not report.notes, report
"""


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["torch.set_default_device('meta')", "torch.device('meta').__enter__()"])
def test_what_the_compiler_computes_is_on_the_processor(ask):
    command, tests = [sys.executable, "-c", PROGRAM.format(ask=ask)], Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
